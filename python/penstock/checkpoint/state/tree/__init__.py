"""A state's structure as typed JSON: its nodes, names of leaves, references to tensors."""
