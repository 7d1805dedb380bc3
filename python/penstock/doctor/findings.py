"""`Finding`: the result of one check of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        check: A name for the check.
        status: ``"ok"``, ``"warn"`` if something is slower or less safe than it could be,
            ``"fail"`` if saves would fail or not be durable.
        found: The observed facts, in a line.
        why: Why they matter; empty if all is well.
        remedy: How to fix it, with a command if there is one.
    """

    check: str
    status: Status
    found: str
    why: str = ""
    remedy: str = ""
