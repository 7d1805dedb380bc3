"""Shared by all packages: process, paths, console, tracing, facts about the machine."""
