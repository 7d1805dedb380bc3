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

from penstock.offload.buffers import Buffers
from penstock.offload.data_file import DataFile
from penstock.offload.streaming.model import StreamReport, report, stream
from penstock.offload.tensor_io import TensorIO
from penstock.offload.transfer import Transfer, TransferReport, wait_all

__all__ = [
    "Buffers",
    "DataFile",
    "StreamReport",
    "TensorIO",
    "Transfer",
    "TransferReport",
    "report",
    "stream",
    "wait_all",
]
