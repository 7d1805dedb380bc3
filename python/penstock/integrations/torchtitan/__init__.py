"""torchtitan, with Penstock below its checkpoint manager.

`Checkpointer` replaces torchtitan's ``CheckpointManager``; the fields of its ``Config`` are the
same and mean the same. torchtitan still decides which steps are saved, how a run begins and what is
left out; Penstock decides when a checkpoint is complete, and from which one a run resumes.

Example:
    >>> from penstock.integrations.torchtitan import Checkpointer
    >>> config = Checkpointer.Config(enable=True, interval=500, async_mode="async_with_pinned_mem")
    >>> config.keep_latest_k
    10
"""

from penstock.integrations.torchtitan import fitting
from penstock.integrations.versions import check_version

check_version("torchtitan", "0.3", "0.3")
fitting.check()

from penstock.integrations.torchtitan.checkpointer import Checkpointer  # noqa: E402

__all__ = ["Checkpointer"]
