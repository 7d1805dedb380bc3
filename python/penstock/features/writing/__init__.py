"""Writes rows into the files of a table, and publishes these as a checkpoint."""
