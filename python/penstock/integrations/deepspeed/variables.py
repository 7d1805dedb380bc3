"""Environment variables that install the ops in a program and in all programs it starts."""

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
    """Environment variables that install the ops in a program and in all programs it starts.

    Args:
        variables: The variables to start from.
        strict: As for `enable`.
    """
    said = variables.get("PYTHONPATH")
    # An empty entry is the working directory.
    path = said.split(os.pathsep) if said else []
    if str(_SITE) not in path:
        path.insert(0, str(_SITE))
    return {
        **variables,
        "PYTHONPATH": os.pathsep.join(path),
        _VARIABLE: _STRICT if strict else _LENIENT,
    }


def is_asked_for() -> bool:
    """Whether the ops are to be installed in this process."""
    return bool(os.environ.get(_VARIABLE))


def is_strict() -> bool:
    """Whether failures raise."""
    return os.environ.get(_VARIABLE) != _LENIENT
