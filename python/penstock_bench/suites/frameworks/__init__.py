"""The time a training loop waits for a save: by the framework's own means, and by the plug-in."""
