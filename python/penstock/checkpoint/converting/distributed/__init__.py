"""Checkpoints of PyTorch DCP and of Megatron-Core, which is built on it."""
