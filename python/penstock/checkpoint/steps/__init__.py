"""The steps of a store: found, loaded, retained, quarantined."""
