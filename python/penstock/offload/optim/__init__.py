"""Optimizers whose state lies in files: where it lies, how it passes, how it lasts."""
