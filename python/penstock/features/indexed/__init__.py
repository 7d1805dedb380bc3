"""Rows of different lengths, in Megatron-Core's indexed datasets (``.bin`` and ``.idx``)."""
