"""The kinds of checkpoints that `convert` reads."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal["accelerate", "dcp", "deepspeed", "lightning", "torch"]

KINDS: tuple[Kind, ...] = get_args(Kind)
