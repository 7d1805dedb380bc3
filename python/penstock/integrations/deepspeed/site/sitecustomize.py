"""Runs when an interpreter begins with this directory in PYTHONPATH, and has the next one run."""

import importlib.machinery
import importlib.util
import os
import sys


def _run_next() -> None:
    """Runs the one that this one hides, which may be that of another Penstock, as itself."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.abspath(one or ".") for one in sys.path]
    # Only of what comes behind this directory: two of these would find each other for ever.
    behind = sys.path[paths.index(here) + 1 :] if here in paths else []
    spec = importlib.machinery.PathFinder.find_spec(__name__, behind)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


def _install() -> None:
    try:
        from penstock.integrations.deepspeed.patches import install_from_environment
    except ImportError:
        # Another environment, which Penstock is not installed in.
        return
    install_from_environment()


try:
    _run_next()
finally:
    # What another one raises is told by the interpreter, which goes on.
    _install()
