"""A whole training run: its parts, captured and restored."""
