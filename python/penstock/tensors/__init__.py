"""Tensors as values: dtypes, the memory they lie in, devices, marks on leaves of a state."""
