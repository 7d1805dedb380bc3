"""Charts of the documentation: `python -m docs.charts` draws each from a table in a page."""
