"""Rows and samples of indexed datasets: by Penstock and by Megatron-Core."""
