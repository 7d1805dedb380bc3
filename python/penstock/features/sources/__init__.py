"""Locates the rows of a table in files of any supported format, and detects changed files."""
