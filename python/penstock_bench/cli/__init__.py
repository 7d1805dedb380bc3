"""The commands of `penstock bench`."""
