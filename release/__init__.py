"""`make release`: builds what would be published, and checks it; publishes nothing.

What each step is for, and how to debug a released wheel, is in ../docs/maintainers/releasing.md.
"""
