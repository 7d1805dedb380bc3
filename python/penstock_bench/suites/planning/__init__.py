"""`make bench SUITE=planning`: a real training run with planted kills, against its prediction.

docs/planning.md has its outcome.
"""
