"""Makes DeepSpeed's conversion of a tag to full-precision weights read our tags, too.

The functions of `deepspeed.utils.zero_to_fp32` open files with `torch.load`. The ZeRO 3 engine
calls them to load a model without its optimizer, and always with the latest tag, not the requested
one.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import deepspeed.runtime.engine as runtime
import torch
from deepspeed.utils import zero_to_fp32

from penstock.integrations.deepspeed import tags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def read_stubs() -> None:
    """Makes these functions read our tags without pickled values, in this process."""
    zero_to_fp32.torch = _Torch(lambda path, device: tags.read_file(path, device=device))


@contextmanager
def weights_by(load: Callable[[str, Any], Any], tag: Any) -> Iterator[None]:
    """Makes them read by an engine, and the requested tag, within the block.

    Args:
        load: Loads a stub, given its path and where tensors go.
        tag: The tag; None for the latest.
    """
    gather, before = runtime.get_fp32_state_dict_from_zero_checkpoint, zero_to_fp32.torch
    runtime.get_fp32_state_dict_from_zero_checkpoint = functools.partial(gather, tag=tag)
    zero_to_fp32.torch = _Torch(load)
    try:
        yield
    finally:
        zero_to_fp32.torch = before
        runtime.get_fp32_state_dict_from_zero_checkpoint = gather


class _Torch:
    """PyTorch, with another `load` for stubs."""

    def __init__(self, load: Callable[[str, Any], Any]) -> None:
        self._load = load

    def load(self, path: str, **how: Any) -> Any:
        if tags.is_stub(path):
            return self._load(path, how.get("map_location"))
        return torch.load(path, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
