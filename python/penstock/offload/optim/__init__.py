"""Optimizers whose state is kept in files: its layout, its updates, its durability."""
