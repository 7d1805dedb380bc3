"""Penstock saves and restores the state of training runs, fast and without ever losing any.

>>> import numpy as np, penstock, tempfile
>>> path = tempfile.mkdtemp() + "/step-100"
>>> report = penstock.save(path, {"w": np.ones(3), "step": 100})
>>> penstock.load(path)
{'w': array([1., 1., 1.]), 'step': 100}
"""

import importlib
import os
from typing import TYPE_CHECKING

from penstock import errors as errors
from penstock.common.native_threads import rest_at_exit
from penstock.errors import PenstockError as PenstockError

if TYPE_CHECKING:
    from penstock import features as features
    from penstock import metrics as metrics
    from penstock import offload as offload
    from penstock import reports as reports
    from penstock import sealing as sealing
    from penstock import signing as signing
    from penstock.checkpoint.api import inspect as inspect
    from penstock.checkpoint.api import load as load
    from penstock.checkpoint.api import save as save
    from penstock.checkpoint.api import sign as sign
    from penstock.checkpoint.api import verify as verify
    from penstock.checkpoint.converting.convert import convert as convert
    from penstock.checkpoint.exporting.adopt import import_model as import_model
    from penstock.checkpoint.exporting.export import export as export
    from penstock.checkpoint.mirroring.mirror import Mirror as Mirror
    from penstock.checkpoint.preemption import Preemption as Preemption
    from penstock.checkpoint.preemption import on_signal as on_signal
    from penstock.checkpoint.recovery import explain as explain
    from penstock.checkpoint.recovery import salvage as salvage
    from penstock.checkpoint.saver import Saver as Saver
    from penstock.checkpoint.saving.guard import guard as guard
    from penstock.checkpoint.saving.pending import PendingSave as PendingSave
    from penstock.checkpoint.state.register import register_type as register_type
    from penstock.checkpoint.store import CheckpointStore as CheckpointStore
    from penstock.checkpoint.training.training import Training as Training
    from penstock.common.tracing import trace as trace
    from penstock.io.remote import Credentials as Credentials
    from penstock.io.remote import Remote as Remote
    from penstock.io.remote import Token as Token
    from penstock.io.remote import set_remote as set_remote
    from penstock.options import Options as Options
    from penstock.sealing.sealing import Sealing as Sealing
    from penstock.tensors.marks import PerRank as PerRank

    __version__: str

_HOMES = {
    "checkpoint.api": ("inspect", "load", "save", "sign", "verify"),
    "checkpoint.converting.convert": ("convert",),
    "checkpoint.exporting.adopt": ("import_model",),
    "checkpoint.exporting.export": ("export",),
    "checkpoint.mirroring.mirror": ("Mirror",),
    "options": ("Options",),
    "checkpoint.preemption": ("Preemption", "on_signal"),
    "checkpoint.recovery": ("explain", "salvage"),
    "io.remote": ("Credentials", "Remote", "Token", "set_remote"),
    "checkpoint.saver": ("Saver",),
    "checkpoint.saving.guard": ("guard",),
    "checkpoint.saving.pending": ("PendingSave",),
    "tensors.marks": ("PerRank",),
    "checkpoint.state.register": ("register_type",),
    "checkpoint.store": ("CheckpointStore",),
    "common.tracing": ("trace",),
    "checkpoint.training.training": ("Training",),
    "sealing.sealing": ("Sealing",),
}
"""Module of each public name, imported at its first use: most need NumPy, and a program that
imports `penstock` for one of its errors or for the command line's help does not.
"""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_MODULES = ("features", "metrics", "offload", "reports", "sealing", "signing")
"""Public modules, also imported at their first use."""

__all__ = sorted(["PenstockError", "errors", *_HOME_OF, *_MODULES, "__version__"])

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "__version__":
            value = importlib.import_module("importlib.metadata").version("penstock")
        elif name in _MODULES:
            return importlib.import_module(f"penstock.{name}")
        elif name in _HOME_OF:
            value = getattr(importlib.import_module(f"penstock.{_HOME_OF[name]}"), name)
        else:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__


rest_at_exit()

if os.environ.get("PENSTOCK_TRACE", "").strip():
    # A trace requested by the environment begins with the process.
    importlib.import_module("penstock.common.tracing").start_from_environment()
