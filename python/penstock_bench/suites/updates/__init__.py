"""Rows of a table written anew, durably: by penstock.features.Table and by others."""
