"""Frameworks that save and load through Penstock: a module for each.

A module needs its framework installed and is imported by whoever uses it, never by the rest of the
package: ``from penstock.integrations.dcp import StorageWriter``. What it stores is a checkpoint
like any other, for `penstock.load` and the command line too.
"""
