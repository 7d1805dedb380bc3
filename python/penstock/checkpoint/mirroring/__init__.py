"""Stores whose steps are copied to a bucket: how, by whom, and what is loaded from where."""
