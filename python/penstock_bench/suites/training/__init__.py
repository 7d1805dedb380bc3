"""`make bench SUITE=training`: what a training run loses by saving, with Penstock and with others.

The rules are in ../README.md.
"""
