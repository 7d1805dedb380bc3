"""Names that the oldest supported PyTorch, 2.4, has elsewhere or lacks.

Other modules import them from here. Names that are newer than 2.4 and have no older place are
looked up where they are used, with a substitute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    SAYS_SHARD_ORDER: bool
else:
    try:
        from torch.distributed.tensor import DTensor, placement_types
    except ImportError:
        # Public from 2.5 on.
        from torch.distributed._tensor import DTensor, placement_types
    SAYS_SHARD_ORDER = hasattr(placement_types, "_StridedShard")

__all__ = ["SAYS_SHARD_ORDER", "DTensor"]
