"""What callers pass, see and are told of: arguments, progress, events."""
