"""One view of a checkpoint that many ranks wrote, and objects that take a loaded state over."""
