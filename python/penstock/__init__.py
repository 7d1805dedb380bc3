"""Penstock saves and restores the state of training runs, fast and without ever losing any.

>>> import numpy as np, penstock, tempfile
>>> path = tempfile.mkdtemp() + "/step-100"
>>> report = penstock.save(path, {"w": np.ones(3), "step": 100})
>>> penstock.load(path)
{'w': array([1., 1., 1.]), 'step': 100}
"""

from importlib.metadata import version as _version

from penstock import metrics
from penstock.checkpoint import inspect, load, save, verify
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    MissingDependencyError,
    OptionsError,
    PartialCheckpointError,
    PenstockError,
    PenstockWarning,
    ProtectedCheckpointError,
    RankError,
    SaveCancelledError,
    SaveInProgressError,
    StateMismatchError,
    StorageError,
    UnsupportedPathError,
    UnsupportedStateError,
)
from penstock.inspection import CheckpointInfo, MissingInfo, TensorInfo
from penstock.native_threads import rest_at_exit as _rest_at_exit
from penstock.options import Options
from penstock.preemption import Preemption, on_signal
from penstock.recovery import Explanation, SalvageReport, TensorFate, explain, salvage
from penstock.reports import (
    Fallback,
    LoadReport,
    Problem,
    RetentionReport,
    SaveReport,
    ScrubbedStep,
    ScrubReport,
    VerifyResult,
)
from penstock.saving.guard import guard
from penstock.saving.pending import PendingSave, SaveProgress
from penstock.state.per_rank import PerRank
from penstock.store import CheckpointStore
from penstock.tracing import start_from_environment as _start_tracing
from penstock.tracing import trace
from penstock.training.training import Training

__version__ = _version("penstock")

_start_tracing()
_rest_at_exit()

__all__ = [
    "CheckpointExistsError",
    "CheckpointInfo",
    "CheckpointNotFoundError",
    "CheckpointStore",
    "CorruptCheckpointError",
    "Explanation",
    "Fallback",
    "FormatVersionError",
    "IncompleteCheckpointError",
    "LoadReport",
    "MissingDependencyError",
    "MissingInfo",
    "Options",
    "OptionsError",
    "PartialCheckpointError",
    "PendingSave",
    "PenstockError",
    "PenstockWarning",
    "PerRank",
    "Preemption",
    "Problem",
    "ProtectedCheckpointError",
    "RankError",
    "RetentionReport",
    "SalvageReport",
    "SaveCancelledError",
    "SaveInProgressError",
    "SaveProgress",
    "SaveReport",
    "ScrubReport",
    "ScrubbedStep",
    "StateMismatchError",
    "StorageError",
    "TensorFate",
    "TensorInfo",
    "Training",
    "UnsupportedPathError",
    "UnsupportedStateError",
    "VerifyResult",
    "__version__",
    "explain",
    "guard",
    "inspect",
    "load",
    "metrics",
    "on_signal",
    "salvage",
    "save",
    "trace",
    "verify",
]
