"""`make release`: builds and checks the files of a release; publishes nothing.

docs/maintainers/releasing.md explains each step, and how to debug a released wheel.
"""
