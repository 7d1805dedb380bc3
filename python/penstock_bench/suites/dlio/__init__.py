"""`make dlio`: DLIO's checkpoint benchmark under MPI, by its own `torch.save` and by Penstock.

The rules are in ../README.md.
"""
