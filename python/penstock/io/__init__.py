"""Reads and writes tensors at offsets of files, with digests: the I/O layer of every job."""
