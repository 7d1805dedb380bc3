"""Tensors at offsets of files, many at a time, read and written without blocking Python.

>>> import numpy as np, penstock.offload, tempfile
>>> path = tempfile.mkdtemp() + "/weights"
>>> with penstock.offload.TensorIO() as io:
...     io.write(np.arange(6), path).result().nbytes
...     half = np.zeros(3, int)
...     io.read(half, path, 3 * 8).result().nbytes
48
24
>>> half
array([3, 4, 5])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from penstock.io.buffers import Buffers
from penstock.io.data_file import DataFile
from penstock.io.tensor_io import TensorIO
from penstock.io.transfer import Transfer, TransferReport, wait_all
from penstock.offload.streaming.budget import Budget
from penstock.offload.streaming.expert_cache import ExpertsReport
from penstock.offload.streaming.model import report, stream
from penstock.offload.streaming.report import StreamReport

if TYPE_CHECKING:
    from penstock.offload.optim.adamw import AdamW
    from penstock.offload.optim.sgd import SGD

__all__ = [
    "SGD",
    "AdamW",
    "Budget",
    "Buffers",
    "DataFile",
    "ExpertsReport",
    "StreamReport",
    "TensorIO",
    "Transfer",
    "TransferReport",
    "report",
    "stream",
    "wait_all",
]

if not TYPE_CHECKING:
    # They import PyTorch, which is not imported before one of them is used.
    _HOME_OF = {"AdamW": "optim.adamw", "SGD": "optim.sgd"}

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'penstock.offload' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"penstock.offload.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
