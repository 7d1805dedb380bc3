"""`make bench SUITE=ranks`: saves and loads by several ranks, and what thousands would plan.

The rules are in ../README.md.
"""
