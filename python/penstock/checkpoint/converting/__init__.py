"""Converts other libraries' checkpoints to Penstock's.

`convert` reads checkpoints of PyTorch, Lightning, DeepSpeed and accelerate. It knows their file
names and formats, and needs none of these packages but PyTorch.
"""
