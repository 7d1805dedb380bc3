"""A file changed while a table is open: other bytes are an error, other metadata is not."""

from __future__ import annotations

import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock import features
from penstock.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 1000


def changed(path: Path, *, byte: bytes | None = None) -> bytes:
    """Overwrites the last row in place, and restores the modification time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-32, os.SEEK_END)
        old = file.read(32)
        file.seek(-32, os.SEEK_END)
        file.write(byte if byte is not None else bytes(32))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return old


def linked(path: Path) -> None:
    os.link(path, path.with_suffix(".more"))


def unlinked(path: Path) -> None:
    path.with_suffix(".other").unlink()


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.ones(ROWS, 8)}, path)
    os.link(path, path.with_suffix(".other"))
    return path


@pytest.mark.parametrize("rename", [linked, unlinked])
def test_a_name_hides_no_change_of_a_file_of_others(foreign: Path, rename: Any) -> None:
    with features.open(foreign) as table:
        assert table.gather([3]).all()
        changed(foreign)
        rename(foreign)
        with pytest.raises(CorruptCheckpointError, match="hard link"):
            table.gather([ROWS - 1])


def test_a_new_name_of_a_file_of_others_is_an_error_that_says_so(foreign: Path) -> None:
    """It looks the same as a change: foreign files have no digests."""
    with features.open(foreign) as table:
        linked(foreign)
        with pytest.raises(CorruptCheckpointError, match=r"a name \(a hard link\).*open"):
            table.gather([3])
    with features.open(foreign) as table:
        assert table.gather([3]).all()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """Saves a checkpoint whose table has no checksums of its rows; returns it and its file."""
    penstock.save(tmp_path / "a", {"x": torch.ones(ROWS, 8)})
    return tmp_path / "a", next((tmp_path / "a").glob("shard-*"))


def test_a_checkpoint_is_compared_with_its_digests_once_a_file_gets_a_name(
    saved: tuple[Path, Path],
) -> None:
    path, shard = saved
    with features.open(path) as table:
        assert not table.stats().is_checked
        linked(shard)
        assert table.gather([3]).all()
        changed(shard)
        shard.with_suffix(".more").unlink()
        with pytest.raises(CorruptCheckpointError) as caught:
            table.gather([3])
        assert caught.value.file == shard.name


def test_rows_of_a_time_when_a_file_differed_are_never_given(saved: tuple[Path, Path]) -> None:
    """The cache may have them, even if the file is restored by then."""
    path, shard = saved
    with features.open(path, cache=features.Cache(1 << 20)) as table:
        old = changed(shard)
        with pytest.raises(CorruptCheckpointError):
            table.gather([ROWS - 1])
        changed(shard, byte=old)
        with pytest.raises(CorruptCheckpointError, match="open it again"):
            table.gather([ROWS - 1])
    with features.open(path, cache=features.Cache(1 << 20)) as table:
        assert table.gather([ROWS - 1]).all()


def test_a_change_on_the_way_to_another_process_is_found(saved: tuple[Path, Path]) -> None:
    path, shard = saved
    with features.open(path) as table:
        sent = pickle.dumps(table)
        changed(shard)
        with pytest.raises(CorruptCheckpointError):
            pickle.loads(sent)


def test_digests_are_compared_across_chunks_and_from_several_threads(tmp_path: Path) -> None:
    """A table of several chunks, which begins and ends within one."""
    rows = np.arange(700_000 * 8, dtype=np.float32).reshape(-1, 8)
    penstock.save(tmp_path / "a", {"b": np.arange(77), "x": rows, "z": np.arange(99)})
    shard = next((tmp_path / "a").glob("shard-*"))
    found: list[Any] = []
    with features.open(tmp_path / "a", "x") as table:
        linked(shard)
        threads = [
            threading.Thread(target=lambda: found.append(table.gather([0, 699_999])))
            for _ in range(4)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len(found) == 4
    assert all(np.array_equal(one, rows[[0, 699_999]]) for one in found)
