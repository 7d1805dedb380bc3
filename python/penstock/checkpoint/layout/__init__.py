"""Who holds and who writes what of a state that many ranks hold."""
