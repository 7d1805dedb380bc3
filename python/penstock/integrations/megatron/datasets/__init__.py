"""Indexed datasets and samples of Megatron-Core, read by Penstock."""
