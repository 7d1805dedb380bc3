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

from penstock import errors
from penstock.errors import *  # noqa: F403
from penstock.native_threads import rest_at_exit

if TYPE_CHECKING:
    from penstock import features as features
    from penstock import metrics as metrics
    from penstock import offload as offload
    from penstock.checkpoint import inspect as inspect
    from penstock.checkpoint import load as load
    from penstock.checkpoint import save as save
    from penstock.checkpoint import verify as verify
    from penstock.converting.convert import Conversion as Conversion
    from penstock.converting.convert import convert as convert
    from penstock.exporting.adopt import import_model as import_model
    from penstock.exporting.export import export as export
    from penstock.exporting.report import ExportReport as ExportReport
    from penstock.inspection import CheckpointInfo as CheckpointInfo
    from penstock.inspection import MissingInfo as MissingInfo
    from penstock.inspection import TensorInfo as TensorInfo
    from penstock.mirroring.mirror import Mirror as Mirror
    from penstock.mirroring.reports import MirrorReport as MirrorReport
    from penstock.mirroring.reports import MirrorStatus as MirrorStatus
    from penstock.options import Options as Options
    from penstock.preemption import Preemption as Preemption
    from penstock.preemption import on_signal as on_signal
    from penstock.recovery import Explanation as Explanation
    from penstock.recovery import SalvageReport as SalvageReport
    from penstock.recovery import TensorFate as TensorFate
    from penstock.recovery import explain as explain
    from penstock.recovery import salvage as salvage
    from penstock.remote import Credentials as Credentials
    from penstock.remote import Remote as Remote
    from penstock.remote import Token as Token
    from penstock.remote import set_remote as set_remote
    from penstock.reports import Fallback as Fallback
    from penstock.reports import LoadReport as LoadReport
    from penstock.reports import Problem as Problem
    from penstock.reports import RetentionReport as RetentionReport
    from penstock.reports import SaveReport as SaveReport
    from penstock.reports import ScrubbedStep as ScrubbedStep
    from penstock.reports import ScrubReport as ScrubReport
    from penstock.reports import VerifyResult as VerifyResult
    from penstock.saver import Saver as Saver
    from penstock.saving.guard import guard as guard
    from penstock.saving.pending import PendingSave as PendingSave
    from penstock.saving.pending import SaveProgress as SaveProgress
    from penstock.state.per_rank import PerRank as PerRank
    from penstock.state.register import register_type as register_type
    from penstock.store import CheckpointStore as CheckpointStore
    from penstock.tracing import trace as trace
    from penstock.training.training import Training as Training

    __version__: str

_HOMES = {
    "checkpoint": ("inspect", "load", "save", "verify"),
    "converting.convert": ("Conversion", "convert"),
    "exporting.adopt": ("import_model",),
    "exporting.export": ("export",),
    "exporting.report": ("ExportReport",),
    "inspection": ("CheckpointInfo", "MissingInfo", "TensorInfo"),
    "mirroring.mirror": ("Mirror",),
    "mirroring.reports": ("MirrorReport", "MirrorStatus"),
    "options": ("Options",),
    "preemption": ("Preemption", "on_signal"),
    "recovery": ("Explanation", "SalvageReport", "TensorFate", "explain", "salvage"),
    "remote": ("Credentials", "Remote", "Token", "set_remote"),
    "reports": (
        "Fallback",
        "LoadReport",
        "Problem",
        "RetentionReport",
        "SaveReport",
        "ScrubReport",
        "ScrubbedStep",
        "VerifyResult",
    ),
    "saver": ("Saver",),
    "saving.guard": ("guard",),
    "saving.pending": ("PendingSave", "SaveProgress"),
    "state.per_rank": ("PerRank",),
    "state.register": ("register_type",),
    "store": ("CheckpointStore",),
    "tracing": ("trace",),
    "training.training": ("Training",),
}
"""Where names are from that are imported when they are asked for: most of them need NumPy, and who
imports this package for one of its errors, or for the help of its command line, does not."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_MODULES = ("features", "metrics", "offload")
"""What is public as a module, imported likewise."""

__all__ = sorted([*errors.__all__, *_HOME_OF, *_MODULES, "__version__"])

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
    # A trace that is asked for by the environment begins with the process.
    importlib.import_module("penstock.tracing").start_from_environment()
