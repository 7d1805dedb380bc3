"""Megatron-Core's distributed checkpoints, saved and loaded by Penstock.

`enable` makes everything that saves in the format ``torch_dist`` use Penstock: Megatron-LM's
``pretrain_gpt.py``, Megatron Bridge, and loops that call `megatron.core.dist_checkpointing`. Loops
that pass strategies of their own can pass `SaveStrategy` and `LoadStrategy` instead.
"""

import importlib
from typing import TYPE_CHECKING

from penstock.integrations.megatron import fitting

fitting.check()

if TYPE_CHECKING:
    from penstock.integrations.megatron.datasets.indexed_dataset import IndexedDataset

from penstock.integrations.megatron.loading import ShardedStateMismatchError  # noqa: E402
from penstock.integrations.megatron.patches import disable, enable  # noqa: E402
from penstock.integrations.megatron.strategies import LoadStrategy, SaveStrategy  # noqa: E402

__all__ = [
    "IndexedDataset",
    "LoadStrategy",
    "SaveStrategy",
    "ShardedStateMismatchError",
    "disable",
    "enable",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "IndexedDataset":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.datasets.indexed_dataset").IndexedDataset
