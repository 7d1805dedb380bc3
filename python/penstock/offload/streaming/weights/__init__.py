"""Weights of units in memory: read from files, verified, bound to modules, dropped."""
