"""Checks of storage for ReFrame."""
