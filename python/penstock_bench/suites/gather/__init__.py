"""Rows by id: `penstock bench gather`."""
