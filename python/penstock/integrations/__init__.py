"""Plug-ins that make frameworks save and load through Penstock: a module for each.

The ``__init__`` of a plug-in names its entry: `enable` for a process, `attach` for an object, or a
class to pass to the framework.

A module needs its framework installed; its users import it, the rest of the package never does:
``from penstock.integrations.dcp import StorageWriter``. It stores checkpoints like any other, which
`penstock.load` and the command line read, too.
"""
