"""Files and ranges of them: marks of changes, digests, durable replacement, safetensors headers."""
