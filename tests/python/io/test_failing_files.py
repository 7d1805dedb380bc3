"""A step, an update, a compaction and a save while any operation of the file system fails.

Each succeeds, or raises an error that names the path; a reopened store has all acknowledged data.
`PENSTOCK_TORTURE_FAULTS` sets the number of random faults for each engine and each of them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import warnings
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest
import torch

import penstock
from conftest import need_uring, tell
from failing import failing_files
from offload.optim.ended import Straight, digest
from offload.optim.training_of import parameters, set_gradients
from penstock import offload
from penstock.errors import PenstockWarning, StorageError
from penstock.features import Cache, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from failing import FailingFiles

FAULTS = int(os.environ.get("PENSTOCK_TORTURE_FAULTS", 5))
SEED = os.environ.get("PENSTOCK_TORTURE_SEED", "4711")
ALWAYS = 1 << 30
KINDS = {
    "write": ("EIO", "ENOSPC", "short"),
    "fsync": ("EIO", "lost"),
    "read": ("EIO", "short", "flipped"),
    "fallocate": ("EIO", "ENOSPC"),
    "create": ("EIO", "ENOSPC"),
    **dict.fromkeys(
        ("fsyncdir", "open", "link", "rename", "truncate", "unlink", "mkdir", "rmdir", "readdir"),
        ("EIO",),
    ),
}


class Subject(Protocol):
    """Files that a call changes."""

    path: Path

    def call(self) -> None:
        """Makes the next change."""

    def open_anew(self) -> None:
        """Reopens the files, as another process would."""

    def check(self, *, has_failed: bool) -> None:
        """Checks all acknowledged changes to the last bit, with at most the last call's beside."""

    def close(self) -> None:
        """Releases the files."""


class Training:
    """Steps of an optimizer with all of its state in files."""

    straight = Straight(((70, 100), (17,), (64, 64), (5,)))

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state"
        self._steps = 0
        self._make()

    def _make(self) -> None:
        self._ours = parameters(torch.bfloat16, self.straight.shapes)
        self._optimizer = offload.AdamW(
            self._ours, directory=self.path, memory_bytes=16 << 20, masters=True
        )

    def call(self) -> None:
        set_gradients(self._steps, self._ours)
        self._optimizer.step()
        self._steps += 1

    def open_anew(self) -> None:
        self._optimizer.close()
        self._make()
        self._optimizer.recover()

    def check(self, *, has_failed: bool) -> None:
        state = self._optimizer.state_dict()["state"]
        steps = int(state[0]["step"]) if state else 0
        assert steps in (self._steps, self._steps + has_failed)
        assert digest(self._ours, state) == self.straight.after(steps)
        self._steps = steps

    def close(self) -> None:
        self._optimizer.close()


class Updates:
    """Updates of a table, each flushed and compacted."""

    rows = 300

    def __init__(self, directory: Path) -> None:
        self.path = directory / "table"
        self._values = np.zeros(self.rows, np.int64)
        self._updated = np.zeros(0, np.int64)
        self._chooser = np.random.default_rng(1)
        self._last = 0
        Table.create(self.path, self.rows, {"value": ((50,), "int64")}).close()
        self._open()

    def _open(self) -> None:
        self._table = Table(
            self.path, cache=Cache(10 << 10), log_bytes=64 << 10, compaction_bytes=None
        )

    def call(self) -> None:
        self._last += 1
        self._updated = self._chooser.permutation(self.rows)[:100]
        rows = self._table.lookup(self._updated)
        rows["value"][:] = self._last
        self._table.update(self._updated, rows)
        self._table.flush()
        self._flushed()
        self._table.compact()

    def _flushed(self) -> None:
        self._values[self._updated] = self._last
        self._updated = self._updated[:0]

    def open_anew(self) -> None:
        self.close()
        self._open()

    def check(self, *, has_failed: bool) -> None:
        found = self._table.lookup(np.arange(self.rows))["value"]
        assert (found == found[:, :1]).all(), "a row is torn"
        # Some rows of a failed update may be there.
        wrong = np.flatnonzero(found[:, 0] != self._values)
        assert set(wrong) <= set(self._updated)
        assert (found[wrong] == self._last).all()
        self._values = found[:, 0].copy()

    def close(self) -> None:
        # An unwritten log is an error here too.
        with contextlib.suppress(StorageError):
            self._table.close()


class Saves:
    """Saves of steps, with retention of two."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "store"
        self._saved = self._tried = 0
        self.open_anew()

    def call(self) -> None:
        self._tried += 1
        with warnings.catch_warnings():
            # Ignores warnings about older steps that could not be deleted.
            warnings.simplefilter("ignore", PenstockWarning)
            self._store.save(self._tried, self._state(self._tried))
        self._saved = self._tried

    @staticmethod
    def _state(step: int) -> dict[str, Any]:
        return {"w": np.full(30_000, step), "b": np.arange(9) + step, "step": step}

    def open_anew(self) -> None:
        self._store = penstock.CheckpointStore(self.path, keep_last=2)

    def check(self, *, has_failed: bool) -> None:
        found = self._store.load()
        assert found["step"] in (self._saved, self._tried)
        for name, value in self._state(found["step"]).items():
            assert np.array_equal(found[name], value)
        self._saved = found["step"]

    def close(self) -> None:
        """No file is open."""


def cases(counts: dict[str, int]) -> list[tuple[str, str, int, int]]:
    """Returns all faults of a call, given its number of operations of each name."""
    return [
        (operation, kind, skip, count)
        for operation, kinds in KINDS.items()
        for kind, skip, count in itertools.product(
            kinds, range(counts.get(operation, 0)), (1, ALWAYS)
        )
    ]


@pytest.fixture(params=["uring", "threads"])
def files(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    need_root: None,
) -> Iterator[FailingFiles]:
    """Yields failing files for each engine, which is made the default one."""
    if request.param == "uring":
        need_uring()
    monkeypatch.setenv("PENSTOCK_ENGINE", request.param)
    with failing_files(tmp_path / "failing") as made:
        yield made


def check_names(error: penstock.PenstockError, path: Path) -> None:
    """Checks that an error names the path."""
    assert str(path) in str(error)


@pytest.mark.parametrize("make", [Training, Updates, Saves])
def test_whatever_fails_what_was_acknowledged_is_there(
    files: FailingFiles, make: Callable[[Path], Subject]
) -> None:
    tell(f"seed {SEED}, {FAULTS} faults")
    chooser = random.Random(SEED)
    subject = make(files.path)
    for _ in range(3):
        files.heal()
        subject.call()
    counts, _ = files.heal()
    drawn = cases(counts)
    chooser.shuffle(drawn)
    for fault in drawn[:FAULTS]:
        tell(*fault)
        files.fail(*fault)
        has_failed = False
        try:
            subject.call()
        except penstock.PenstockError as error:
            has_failed = True
            # Or the directory above, if a name in it cannot be made durable.
            check_names(error, files.path)
        files.heal()
        gc.collect()
        subject.open_anew()
        subject.check(has_failed=has_failed)
    subject.call()
    subject.check(has_failed=False)
    subject.close()
