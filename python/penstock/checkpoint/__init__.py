"""Checkpoints: states saved, restored, verified, mirrored, converted and exported."""
