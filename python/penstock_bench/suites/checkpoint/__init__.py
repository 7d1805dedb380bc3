"""Checkpoints of a model by several ranks: `penstock bench checkpoint`."""
