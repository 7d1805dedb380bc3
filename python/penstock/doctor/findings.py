"""One finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: A word for what was looked at.
        status: ``"ok"``, ``"warn"`` if something is slower or less safe than it could be,
            ``"fail"`` if saves would fail or not be durable.
        found: What there is, in a line.
        why: Why it matters; empty where all is well.
        remedy: What mends it: a command where there is one.
    """

    check: str
    status: Status
    found: str
    why: str = ""
    remedy: str = ""
