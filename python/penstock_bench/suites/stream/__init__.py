"""Models larger than memory that generate text: `penstock bench stream`."""
