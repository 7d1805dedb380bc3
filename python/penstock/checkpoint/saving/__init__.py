"""One save: taken apart, staged, written, committed, alone or among many ranks."""
