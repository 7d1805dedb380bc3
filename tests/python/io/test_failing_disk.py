"""A step, a compaction and a save on a failing disk, on each engine: an error, nothing lost."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import penstock
from conftest import slow
from failing import failing_disk
from offload.optim.training_of import assert_equal, parameters, set_gradients
from penstock import offload
from penstock.errors import StorageError
from penstock.features import Cache, Table

if TYPE_CHECKING:
    from pathlib import Path

DISK_BYTES = 256 << 20
ROOMS = (0, *slow(1 << 20), 5 << 20)
"""Bytes written before the first failure."""

REFUSED = (errno.EIO, errno.ENOSPC)
"""Error numbers of such a write, by kernel."""

SHAPES = ((2 << 20,),)


@pytest.fixture(params=["uring", "threads"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, need_root: None) -> str:
    """Sets the default engine."""
    chosen: str = request.param
    monkeypatch.setenv("PENSTOCK_ENGINE", chosen)
    return chosen


@pytest.mark.parametrize("room_bytes", ROOMS)
def test_an_optimizer_step_that_cannot_be_written_is_an_error(
    tmp_path: Path, engine: str, room_bytes: int
) -> None:
    theirs = parameters(shapes=SHAPES)
    other = torch.optim.AdamW(theirs, fused=True)
    ours = parameters(shapes=SHAPES)
    with failing_disk(tmp_path / "failing", DISK_BYTES) as disk:
        optimizer = offload.AdamW(ours, directory=disk.path / "state", memory_bytes=6 << 20)
        for step in range(2):
            set_gradients(step, theirs, ours)
            other.step()
            if step == 0:
                optimizer.step()
                state = {"model": ours, "optimizer": optimizer.state_dict()}
                penstock.save(tmp_path / "checkpoint", state)
                del state
        disk.fail(room_bytes)
        with pytest.raises(StorageError) as raised:
            optimizer.step()
        assert raised.value.errno in REFUSED
        # The step starts again from the checkpoint.
        disk.heal()
        loaded = penstock.load(tmp_path / "checkpoint")
        with torch.no_grad():
            ours[0].copy_(loaded["model"][0])
        optimizer.load_state_dict(loaded["optimizer"])
        optimizer.step()
        assert_equal(theirs, ours)
        optimizer.close()


@pytest.mark.parametrize("room_bytes", ROOMS)
def test_rows_that_were_flushed_outlive_a_fold_that_cannot_be_written(
    tmp_path: Path, engine: str, room_bytes: int
) -> None:
    count = 3000
    with failing_disk(tmp_path / "failing", DISK_BYTES) as disk:
        path = disk.path / "table"
        columns = {"value": ((500,), "int64")}
        table = Table.create(path, count, columns, log_bytes=32 << 20, compaction_bytes=None)
        try:
            rows = table.lookup(torch.arange(count))
            rows["value"][:] = torch.arange(count)[:, None]
            table.update(torch.arange(count), rows)
            table.flush()
            disk.fail(room_bytes)
            with pytest.raises(StorageError) as raised:
                table.compact()
            assert raised.value.errno in REFUSED
        finally:
            disk.heal()
            # An unwritten log is an error here too.
            with contextlib.suppress(StorageError):
                table.close()
        with Table(path, cache=Cache(1 << 20)) as table:
            found = table.lookup(torch.arange(count))["value"]
        assert torch.equal(found, torch.arange(count)[:, None].expand(-1, 500))


@pytest.mark.parametrize("room_bytes", ROOMS)
def test_a_save_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, engine: str, room_bytes: int
) -> None:
    with failing_disk(tmp_path / "failing", DISK_BYTES) as disk:
        store = penstock.CheckpointStore(disk.path / "store")
        store.save(1, {"w": np.full(1 << 20, 1.0)})
        disk.fail(room_bytes)
        with pytest.raises(StorageError) as raised:
            store.save(2, {"w": np.full(1 << 20, 2.0)})
        assert raised.value.errno in REFUSED
        disk.heal()
        assert store.latest() == 1
        np.testing.assert_array_equal(store.load()["w"], np.full(1 << 20, 1.0))
        store.save(2, {"w": np.full(1 << 20, 2.0)})
        assert penstock.verify(store.path(2)).ok
