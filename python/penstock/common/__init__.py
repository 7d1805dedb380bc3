"""Shared by all packages: the process, paths, the console, tracing, facts about the machine."""
