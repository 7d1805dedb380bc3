"""`weights_by`: DeepSpeed puts the weights of ZeRO 3 together from files of our tags as well.

Asked for a model without its optimizer, its engine of stage 3 calls a function that opens files by
`torch.load`, and takes the latest tag for whichever was asked for.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import deepspeed.runtime.engine as runtime
import torch
from deepspeed.utils import zero_to_fp32

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _Torch:
    """PyTorch, but for who loads."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load

    def load(self, path: str, *, map_location: Any = None, **_: Any) -> Any:
        return self._load(path, map_location)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def weights_by(load: Callable[..., Any], tag: Any) -> Iterator[None]:
    """Has these files opened by another function in the block, and those of the right tag.

    Args:
        load: Is given a path and where tensors go.
        tag: Which one; None for the latest.
    """
    gather = runtime.get_fp32_state_dict_from_zero_checkpoint
    runtime.get_fp32_state_dict_from_zero_checkpoint = functools.partial(gather, tag=tag)
    zero_to_fp32.torch = _Torch(load)
    try:
        yield
    finally:
        zero_to_fp32.torch = torch
        runtime.get_fp32_state_dict_from_zero_checkpoint = gather
