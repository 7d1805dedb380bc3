"""Objects as Megatron-Core pickles them."""

from __future__ import annotations

import io
from typing import Any

import torch


def pickled(value: Any) -> bytes:
    """The bytes of `torch.save`."""
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()
