"""Runs when an interpreter begins with this directory in PYTHONPATH, and has the next one run."""

import importlib.machinery
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_others = [one for one in sys.path if os.path.abspath(one or ".") != _here]
_spec = importlib.machinery.PathFinder.find_spec(__name__, _others)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(sys.modules[__name__])

try:
    from penstock.integrations.deepspeed.hook import install_from_environment
except ImportError:
    # Another environment, which Penstock is not installed in.
    pass
else:
    install_from_environment()
