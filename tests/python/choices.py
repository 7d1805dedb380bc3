"""Hypothesis strategies: options set by `penstock.Options`, the environment, or both."""

from __future__ import annotations

import dataclasses
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

from hypothesis import strategies as st

import penstock
from conftest import uring_refusal
from penstock.common.option_kinds import Flag, Number, Word

if TYPE_CHECKING:
    from collections.abc import Iterator

_MIB = 1 << 20

_SUITED = {
    "extent_bytes": [_MIB, 3 * _MIB],
    "staging_bytes": [8 * _MIB, 64 * _MIB],
    "shard_bytes": [4096, 5 * 4096 + 1, _MIB],
}
"""Values that suit each other, or the drawn states, for options that have to."""


def _values(option: dataclasses.Field[object]) -> list[object]:
    """Returns the values to draw for an option; direct I/O has to be possible."""
    match option.metadata["kind"]:
        case Word(words):
            return [*words]
        case Flag():
            return [True, False]
        case Number(least, most) as number:
            drawn = {least + one * number.multiple_of for one in (0, 1, 6, 63)}
            return _SUITED.get(option.name) or sorted(one for one in drawn if one <= most)
        case other:
            raise AssertionError(f"nothing is drawn for {other}")


_OPTIONS = {option.name: option for option in dataclasses.fields(penstock.Options)}
_VALUES = {name: _values(option) for name, option in _OPTIONS.items()}


@dataclass(frozen=True)
class Choices:
    """Options given by a caller, and variables of the environment."""

    given: dict[str, object]
    environment: dict[str, str]

    @contextmanager
    def made(self) -> Iterator[penstock.Options | None]:
        """Sets the environment and yields the value of ``options=``."""
        with mock.patch.dict(os.environ, self.environment):
            yield penstock.Options(**self.given) if self.given else None

    @property
    def verifies(self) -> bool:
        """Whether loads check digests."""
        of_environment = self.environment.get("PENSTOCK_VERIFY", "1") != "0"
        return bool(self.given.get("verify", of_environment))


@st.composite
def choices(draw: st.DrawFn, **fixed: object) -> Choices:
    """Draws each option: open, given, set by its variable, or both.

    Args:
        fixed: Options with a fixed value, by name; they are given or set by variable.
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
                environment[_OPTIONS[name].metadata["variable"]] = text
            case "both":
                # The given value takes precedence.
                given[name] = value
                other = draw(st.sampled_from(values)) if name not in fixed else value
                other = str(int(other)) if isinstance(other, bool) else str(other)
                environment[_OPTIONS[name].metadata["variable"]] = other
    return Choices(given, environment)
