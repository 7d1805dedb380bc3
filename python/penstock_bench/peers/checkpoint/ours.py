"""Penstock as it comes: saved at once, and in the background, clear or sealed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import TYPE_CHECKING, Any

import penstock
from penstock import _native
from penstock_bench.harness.storage import files_below
from penstock_bench.peers.checkpoint.base import Detail, Writer

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.workloads.content import StateSpec


_KEY = hashlib.sha256(b"penstock bench").hexdigest()
"""The key that ranks share. The state is drawn and thrown away, so the key is no secret."""


class Penstock(Writer):
    """The defaults, which a user gets, or other options by name."""

    synced = "everything"

    def __init__(
        self, rank: int = 0, ranks: int = 1, *, is_sealed: bool = False, **options: Any
    ) -> None:
        super().__init__(rank, ranks)
        self._options = penstock.Options(**options)
        self._sealing = penstock.Sealing([_KEY]) if is_sealed else None
        self._identities = [_KEY] if is_sealed else None

    def input(self, source: StateSpec) -> Any:
        """The state; of several ranks, that of each is its own."""
        state = source.nested()
        return penstock.PerRank(state) if self.ranks > 1 else state

    def save(self, directory: Path, state: Any) -> Detail:
        """`penstock.save`."""
        path = directory / "state"
        report = penstock.save(
            path, state, options=self._options, sealing=self._sealing, no_dist=self.ranks == 1
        )
        return self._detail(report, path)

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, Detail]:
        """`penstock.load`."""
        return self._load(directory / "state", variant)

    def own_files(self, directory: Path) -> list[Path]:
        """Shards and part of the rank; of the first, also the manifest."""
        files = ((path, _native.rank_of_file(path.name)) for path in files_below(directory))
        return [path for path, rank in files if (rank or 0) == self.rank]

    def _load(self, path: Path, variant: str | None) -> tuple[Any, Detail]:
        reports: list[penstock.reports.LoadReport] = []
        options = self._options
        if variant == "unverified":
            options = dataclasses.replace(options, verify=False)
        state = penstock.load(
            path, options=options, identities=self._identities, report=reports.append
        )
        return state, dataclasses.asdict(reports[0])

    def _detail(self, report: penstock.reports.SaveReport, path: Path) -> Detail:
        return {**dataclasses.asdict(report), "syncs": report.files + self._directory_syncs(path)}

    def _directory_syncs(self, path: Path) -> int:
        """One sync of every file, and those of directories by the rules of format.md, 7.

        Each rank syncs the directory of the checkpoint after its part. The first rank also syncs
        all directories above it on the same file system before anything is written, and the
        directory of the checkpoint once more after the manifest.
        """
        if self.rank:
            return 1
        device = path.stat().st_dev
        above = 0
        for parent in path.resolve().parents:
            if parent.stat().st_dev != device:
                break
            above += os.access(parent, os.R_OK)
        return above + 2


class PenstockAsync(Penstock):
    """`CheckpointStore.save_async`: copied, then written in the background."""

    _store: penstock.CheckpointStore | None = None

    def save(self, directory: Path, state: Any) -> Detail:
        """Saves as a step of the store above the directory, which is named for the step."""
        if self._store is None or self._store.root != str(directory.parent):
            self.close()
            # It keeps the memory that it stages in from save to save.
            self._store = penstock.CheckpointStore(
                directory.parent,
                options=self._options,
                sealing=self._sealing,
                no_dist=self.ranks == 1,
            )
        step = _native.parse_step(directory.name)
        if step is None:
            raise ValueError(f"{directory} is not named as the directory of a step")
        pending = self._store.save_async(step, state)
        report = pending.result()
        return {**self._detail(report, directory), "stall_seconds": pending.stall_seconds}

    def load(self, directory: Path, targets: Any, variant: str | None = None) -> tuple[Any, Detail]:
        """`penstock.load`."""
        return self._load(directory, variant)

    def close(self) -> None:
        """Gives the staging memory back."""
        if self._store is not None:
            self._store.close()
            self._store = None
