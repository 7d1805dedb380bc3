"""torchtitan, with Penstock below its checkpoint manager.

`Checkpointer` takes the place of torchtitan's ``CheckpointManager``: the fields of its ``Config``
are the same and mean the same. Which steps are saved, what a run begins with and what is left out
stays torchtitan's; how a checkpoint becomes complete, and which one a run goes on with, is
Penstock's.

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
