"""Directories in Hugging Face's layout: exported from checkpoints, and imported as checkpoints."""
