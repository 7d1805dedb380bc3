"""Penstock: as it comes, without io_uring, and through the page cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import penstock
from benches.contenders.base import Contender, Detail

if TYPE_CHECKING:
    from pathlib import Path


class Penstock(Contender):
    """The defaults: what a user gets."""

    settings: ClassVar[dict[str, Any]] = {}

    def save(self, directory: Path, state: Any) -> Detail:
        """`penstock.save`."""
        report = penstock.save(directory / "state", state, options=self._options())
        return dataclasses.asdict(report)

    def load(self, directory: Path, targets: Any, variant: str | None) -> tuple[Any, Detail]:
        """`penstock.load`."""
        reports: list[penstock.LoadReport] = []
        changes = {"verify": False} if variant == "unverified" else {}
        options = self._options(**changes)
        state = penstock.load(directory / "state", options=options, report=reports.append)
        return state, dataclasses.asdict(reports[0])

    def _options(self, **changes: Any) -> penstock.Options:
        return penstock.Options(**{**self.settings, **changes})


class PenstockThreads(Penstock):
    """The engine for kernels and containers without io_uring."""

    settings: ClassVar[dict[str, Any]] = {"engine": "threads"}


class PenstockBuffered(Penstock):
    """The fallback for file systems without direct I/O."""

    settings: ClassVar[dict[str, Any]] = {"direct": "off"}
