"""One rank's view of a checkpoint, and objects that take over a loaded state."""
