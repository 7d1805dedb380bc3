"""`make bench`: Penstock beside fio and the libraries a user would pick instead.

The rules that make the numbers comparable are in README.md.
"""
