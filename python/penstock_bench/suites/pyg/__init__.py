"""An epoch of a graph network with its features on storage, beside its bounds."""
