"""Weights streamed from storage: a model that does not fit into memory, read ahead of its use."""
