"""The variables of the environment by which a program has the ops, and every one that it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLE = "PENSTOCK_DEEPSPEED"
_STRICT, _LENIENT = "strict", "lenient"
_SITE = Path(__file__).with_name("site")


def environment(variables: Mapping[str, str], *, strict: bool = True) -> dict[str, str]:
    """Variables with which a program, and every one that it starts, has the ops installed.

    Args:
        variables: Those that it would have.
        strict: As for `install`.
    """
    said = variables.get("PYTHONPATH")
    # An empty one among them is the working directory.
    path = said.split(os.pathsep) if said else []
    if str(_SITE) not in path:
        path.insert(0, str(_SITE))
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(path),
        _VARIABLE: _STRICT if strict else _LENIENT,
    }


def is_asked_for() -> bool:
    """Whether this process is to have the ops."""
    return bool(os.environ.get(_VARIABLE))


def is_strict() -> bool:
    """Whether what goes wrong raises."""
    return os.environ.get(_VARIABLE) != _LENIENT
