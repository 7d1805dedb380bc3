"""PyTorch's Distributed Checkpoint (DCP), with Penstock as its storage.

Pass `StorageWriter` and `StorageReader` to ``dcp.save``, ``dcp.async_save`` and ``dcp.load``. DCP
and its planners plan as before; Penstock moves the bytes and decides when a checkpoint is complete.
`enable` makes DCP use them wherever no writer or reader is named.

Example:
    >>> import tempfile, torch
    >>> import torch.distributed.checkpoint as dcp
    >>> from penstock.integrations.dcp import StorageReader, StorageWriter
    >>> path = tempfile.mkdtemp() + "/step-100"
    >>> state = {"model": {"w": torch.ones(2, 3)}, "step": 100}
    >>> metadata = dcp.save(state, storage_writer=StorageWriter(path), no_dist=True)
    >>> target = {"model": {"w": torch.zeros(2, 3)}, "step": 0}
    >>> dcp.load(target, storage_reader=StorageReader(path), no_dist=True)
    >>> target["step"], target["model"]["w"].sum().item()
    (100, 6.0)
"""

from penstock.integrations.dcp.patches import disable, enable
from penstock.integrations.dcp.reader import StorageReader
from penstock.integrations.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "disable", "enable"]
