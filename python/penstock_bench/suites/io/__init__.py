"""Requests of every kind, and the settings that are best: `penstock bench io`."""
