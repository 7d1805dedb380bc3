"""`PerRank`: a value that each rank keeps for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value of which each rank has its own, where many ranks save together.

    Only plain tensors may need it. Plain values, arrays and byte strings are kept for each rank in
    any case, and so are tensors that differ; see `penstock.save`. The mark spares thousands of
    ranks finding out that they do. What is loaded is the value itself. In a target of
    ``load(into=…)`` it may be marked as well or not.

    Attributes:
        value: Any state, tensors included.

    Example:
        >>> import penstock, tempfile
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = penstock.save(path, {"sampler": penstock.PerRank([1, 2])})
        >>> penstock.load(path)
        {'sampler': [1, 2]}
    """

    value: Any
