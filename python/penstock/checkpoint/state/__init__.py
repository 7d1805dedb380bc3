"""A state as values: its tree, its tensors in memory, and their ties."""
