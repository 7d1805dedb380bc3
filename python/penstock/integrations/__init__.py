"""Plug-ins that make frameworks save and load through Penstock: a module for each.

A module needs its framework installed; its users import it, the rest of the package never does:
``from penstock.integrations.dcp import StorageWriter``. It stores checkpoints like any other, which
`penstock.load` and the command line read, too.
"""
