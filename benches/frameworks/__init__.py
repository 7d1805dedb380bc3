"""What saves cost in the frameworks that plug-ins are for."""
