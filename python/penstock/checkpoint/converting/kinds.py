"""The kinds of checkpoints that `convert` reads."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal["accelerate", "dcp", "deepspeed", "lightning", "megatron", "torch"]

KINDS: tuple[Kind, ...] = get_args(Kind)

Target: TypeAlias = Literal["penstock", "megatron"]

TARGETS: tuple[Target, ...] = get_args(Target)
"""The formats that `convert` writes."""
