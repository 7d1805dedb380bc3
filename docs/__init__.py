"""The pages of the documentation, the charts in them, and what makes the site of both."""
