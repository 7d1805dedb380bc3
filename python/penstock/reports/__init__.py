"""Reports of finished calls, such as `SaveReport`, `LoadReport` and `VerifyResult`.

A report shows how the bytes moved: the engine, direct I/O, and each fallback with its reason. GB is
10**9 bytes. ``str`` of a report is a few lines for people, ``repr`` all of its fields.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.reports.checks import (
    Problem,
    RetentionReport,
    ScrubbedStep,
    ScrubReport,
    SignResult,
    VerifyResult,
)
from penstock.reports.contents import CheckpointInfo, FileInfo, MissingInfo, PieceInfo, TensorInfo
from penstock.reports.fallbacks import Fallback, FallbackKind
from penstock.reports.transfers import LoadReport, SaveProgress, SaveReport

if TYPE_CHECKING:
    from penstock.reports.copies import Conversion, ExportReport, MirrorReport, MirrorStatus
    from penstock.reports.damage import Explanation, SalvageReport, TensorFate

__all__ = [
    "CheckpointInfo",
    "Conversion",
    "Explanation",
    "ExportReport",
    "Fallback",
    "FallbackKind",
    "FileInfo",
    "LoadReport",
    "MirrorReport",
    "MirrorStatus",
    "MissingInfo",
    "PieceInfo",
    "Problem",
    "RetentionReport",
    "SalvageReport",
    "SaveProgress",
    "SaveReport",
    "ScrubReport",
    "ScrubbedStep",
    "SignResult",
    "TensorFate",
    "TensorInfo",
    "VerifyResult",
]

if not TYPE_CHECKING:
    # Saves and loads do without these, so they are defined at their first use.
    _HOMES = {
        "copies": ("Conversion", "ExportReport", "MirrorReport", "MirrorStatus"),
        "damage": ("Explanation", "SalvageReport", "TensorFate"),
    }
    _HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'penstock.reports' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"penstock.reports.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
