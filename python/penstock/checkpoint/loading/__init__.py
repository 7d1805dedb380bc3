"""Loads one checkpoint: views it as a rank, plans and reads its bytes, builds the state."""
