"""The distribution of a state over ranks: who holds and who writes each tensor."""
