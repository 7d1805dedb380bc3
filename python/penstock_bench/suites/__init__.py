"""The suites: each is a scenario, and the table of its results.

The rules that make their numbers comparable are in README.md.
"""
