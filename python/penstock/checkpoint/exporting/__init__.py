"""Directories as Hugging Face has them: made of checkpoints, and made into checkpoints."""
