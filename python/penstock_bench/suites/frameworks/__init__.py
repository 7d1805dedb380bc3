"""What a save costs a training loop: a framework's own, and by the plug-in."""
