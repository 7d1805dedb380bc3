"""One save: flattened, staged, written, committed, by one process or many ranks."""
