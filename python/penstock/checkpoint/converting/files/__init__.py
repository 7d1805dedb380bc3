"""Readers of files of others: pickles by name, without running them, and safetensors."""
