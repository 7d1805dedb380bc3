"""Tensors as values: dtypes, memory, devices, file tensors, marks on leaves of a state."""
