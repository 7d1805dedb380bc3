"""`penstock.offload.Buffers`: memory for tensors that storage can reach without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.errors import StorageError
from penstock.offload import Buffers, TensorIO

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, np.int16, "float64"])
def test_tensors_have_what_they_were_asked_for(dtype: Any) -> None:
    buffers = Buffers(64 << 20)
    tensor = buffers.empty((3, 5), dtype)
    assert tuple(tensor.shape) == (3, 5)
    assert tensor.dtype == (dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype))
    tensor[:] = 1
    assert (tensor == 1).all()
    like = buffers.empty_like(tensor)
    assert (type(like), like.dtype, like.shape) == (type(tensor), tensor.dtype, tensor.shape)


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    buffers = Buffers(64 << 20)
    tensor = buffers.empty(1 << 20, torch.float32)
    address = tensor.data_ptr()
    assert address % (2 << 20) == 0
    assert buffers.used_bytes == 4 << 20
    view = tensor[5:]
    del tensor
    assert buffers.used_bytes == 4 << 20
    del view
    assert (buffers.used_bytes, buffers.free_bytes) == (0, 4 << 20)
    assert buffers.empty((1000, 1000), np.float32).ctypes.data == address
    buffers.release()
    assert buffers.free_bytes == 0


def test_nothing_and_scalars() -> None:
    buffers = Buffers(1 << 20)
    assert buffers.empty((0, 3), torch.float32).shape == (0, 3)
    assert buffers.empty((0, 3), np.float32).shape == (0, 3)
    assert buffers.empty((), torch.float32).shape == ()


def test_sizes_are_any_whole_numbers() -> None:
    buffers = Buffers(1 << 20)
    assert buffers.empty(np.int64(5), torch.float32).shape == (5,)
    assert buffers.empty((np.int32(2), 3), np.uint8).shape == (2, 3)
    # Their product overflows 64 bits.
    with pytest.raises(StorageError):
        buffers.empty((np.int64(1 << 32), np.int64(1 << 32)), np.uint8)


def test_the_budget_is_kept() -> None:
    buffers = Buffers(8 << 20)
    held = buffers.empty(6 << 20, np.uint8)
    with pytest.raises(StorageError, match="budget"):
        buffers.empty(4 << 20, np.uint8)
    for shape in ((1 << 61,), (1 << 62, 1 << 62)):
        for dtype in (np.float32, torch.float32):
            with pytest.raises(StorageError, match="allocate"):
                buffers.empty(shape, dtype)
    del held
    assert buffers.empty(8 << 20, np.uint8).nbytes == 8 << 20


def test_what_cannot_be() -> None:
    buffers = Buffers(1 << 20)
    with pytest.raises(ValueError, match="negative"):
        buffers.empty((3, -1), np.uint8)
    with pytest.raises(TypeError, match="dtype"):
        buffers.empty(3, object)
    for budget in (0, -1, 1 << 63):
        with pytest.raises(ValueError, match="budget_bytes"):
            Buffers(budget)
    with pytest.raises(TypeError, match="budget_bytes"):
        Buffers(1.5)  # type: ignore[arg-type]


def test_locked_memory_stays() -> None:
    try:
        tensor = Buffers(4 << 20, lock=True).empty(1 << 20, np.uint8)
    except StorageError as error:
        pytest.skip(f"nothing may be locked here: {error}")
    start = tensor.ctypes.data
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        for line in lines:
            first, _, last = line.split(" ")[0].partition("-")
            if last and int(first, 16) <= start < int(last, 16):
                break
        locked = next(line for line in lines if line.startswith("Locked:"))
    assert int(locked.split()[1]) * 1024 >= tensor.nbytes


def test_bytes_go_straight_to_storage(tmp_path: Path) -> None:
    buffers = Buffers(64 << 20)
    tensor = buffers.empty(3 << 20, torch.uint8)
    tensor.random_(0, 256)
    with TensorIO() as io:
        written = io.write(tensor, tmp_path / "file").result(120)
        into = buffers.empty_like(tensor)
        read = io.read(into, tmp_path / "file").result(120)
    assert (written.staged_bytes, read.staged_bytes) == (0, 0)
    assert torch.equal(into, tensor)
