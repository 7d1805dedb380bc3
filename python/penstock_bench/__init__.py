"""Benchmarks of storage: what `penstock bench` runs.

Each measures *cases*, interleaved in *rounds*, and keeps every single measurement in one form of
JSON (`results`), from which all tables and plots are made.
"""
