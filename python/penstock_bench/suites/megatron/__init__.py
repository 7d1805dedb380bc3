"""Megatron-Core on gloo ranks: saves and loads by its own format and by Penstock.

The command of the package (`make bench SUITE=megatron`) measures both in turns; `profile` (`make
megatron`) trains a small GPT and shows the phases of its I/O.
"""
