"""Megatron-Core's distributed checkpoints, saved and loaded by Penstock.

`enable` makes everything that saves in the format ``torch_dist`` use Penstock: Megatron-LM's
``pretrain_gpt.py``, Megatron Bridge, and loops that call `megatron.core.dist_checkpointing`. Loops
that pass strategies of their own can pass `SaveStrategy` and `LoadStrategy` instead.
"""

from penstock.integrations.megatron import fitting

fitting.check()

from penstock.integrations.megatron.loading import ShardedStateMismatchError  # noqa: E402
from penstock.integrations.megatron.patches import disable, enable  # noqa: E402
from penstock.integrations.megatron.strategies import LoadStrategy, SaveStrategy  # noqa: E402

__all__ = ["LoadStrategy", "SaveStrategy", "ShardedStateMismatchError", "disable", "enable"]
