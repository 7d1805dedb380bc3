"""Builds the documentation site: `python -m docs.site` leaves it in `site/`."""
