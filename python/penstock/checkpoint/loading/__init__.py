"""One load: what of a checkpoint a rank sees, what is read, what is built of that."""
