"""Measurements, their statistics, and how two runs compare."""
