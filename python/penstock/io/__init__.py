"""Reads and writes of tensors at offsets of files, with digests: the I/O that every job uses."""
