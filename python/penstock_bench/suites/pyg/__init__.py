"""What an epoch of a graph network takes with its features on storage, beside its bounds."""
