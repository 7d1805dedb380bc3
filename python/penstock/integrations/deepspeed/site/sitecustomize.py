"""Runs when an interpreter starts with this directory in PYTHONPATH; runs the next one, too."""

import importlib.machinery
import importlib.util
import os
import sys


def _run_next() -> None:
    """Runs, as itself, the sitecustomize hidden by this one, perhaps of another Penstock."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.abspath(one or ".") for one in sys.path]
    # Only behind this directory: two of these would otherwise find each other for ever.
    behind = sys.path[paths.index(here) + 1 :] if here in paths else []
    spec = importlib.machinery.PathFinder.find_spec(__name__, behind)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


def _install() -> None:
    try:
        from penstock.integrations.deepspeed.patches import enable_from_environment
    except ImportError:
        # Another environment, in which Penstock is not installed.
        return
    enable_from_environment()


try:
    _run_next()
finally:
    # The interpreter prints an error of another sitecustomize, and goes on.
    _install()
