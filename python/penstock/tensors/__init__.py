"""Dtypes, memory and devices of tensors; tensors in files; marks on states and leaves."""
