"""A state as values: its tree, its tensors in memory, and what is tied to what."""
