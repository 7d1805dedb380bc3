"""Hypothesis strategies: what callers choose, by `penstock.Options` or the environment or both."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

from hypothesis import strategies as st

import penstock
from conftest import uring_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIB = 1 << 20

_VALUES = {
    "engine": ["auto", "threads", "uring"],
    "direct": ["auto", "on", "off"],
    "queue_depth": [1, 2, 7, 64],
    "extent_bytes": [_MIB, 3 * _MIB],
    "io_threads": [1, 2, 5],
    "staging_bytes": [8 * _MIB, 64 * _MIB],
    "verify": [True, False],
    "shard_bytes": [4096, 5 * 4096 + 1, _MIB],
}
"""What is drawn for each option, beside leaving it open; direct I/O has to be possible."""


@dataclass(frozen=True)
class Choices:
    """Options that a caller gives, and variables of the environment."""

    given: dict[str, object]
    environment: dict[str, str]

    @contextmanager
    def made(self) -> Iterator[penstock.Options | None]:
        """What to pass as ``options=`` while the environment is as it says."""
        with mock.patch.dict(os.environ, self.environment):
            yield penstock.Options(**self.given) if self.given else None

    @property
    def verifies(self) -> bool:
        """Whether loads are to check digests."""
        of_environment = self.environment.get("PENSTOCK_VERIFY", "1") != "0"
        return bool(self.given.get("verify", of_environment))


@st.composite
def choices(draw: st.DrawFn, **fixed: object) -> Choices:
    """Each option left open, given, set by its variable, or both.

    Args:
        fixed: Options that are not drawn, by name; they come by either way.
    """
    given: dict[str, object] = {}
    environment: dict[str, str] = {}
    for name, values in _VALUES.items():
        if name == "engine" and uring_refusal() is not None:
            values = [value for value in values if value != "uring"]
        value = fixed.get(name, draw(st.sampled_from([None, *values])))
        if value is None:
            continue
        text = str(int(value)) if isinstance(value, bool) else str(value)
        match draw(st.sampled_from(["given", "environment", "both"])):
            case "given":
                given[name] = value
            case "environment":
                environment[f"PENSTOCK_{name.upper()}"] = text
            case "both":
                # What is given counts.
                given[name] = value
                other = draw(st.sampled_from(values)) if name not in fixed else value
                other = str(int(other)) if isinstance(other, bool) else str(other)
                environment[f"PENSTOCK_{name.upper()}"] = other
    return Choices(given, environment)
