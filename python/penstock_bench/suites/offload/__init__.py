"""Tensors at offsets of files: `penstock.offload`, DeepSpeed's async_io, fio at equal settings."""
