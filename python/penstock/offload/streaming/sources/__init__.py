"""Locates a model's weights: in checkpoints, in files of transformers, in files of accelerate."""
