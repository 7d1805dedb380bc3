"""The commands `penstock bench …`."""
