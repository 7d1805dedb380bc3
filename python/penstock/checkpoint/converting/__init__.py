"""Checkpoints of others, saved anew as Penstock's.

`convert` reads what PyTorch, Lightning, DeepSpeed and accelerate have written. It knows how their
files are called and what is in them, and needs none of these packages but PyTorch.
"""
