"""Copies a store's steps to a bucket, and loads each step from the nearest copy."""
