"""DeepSpeed's tensor I/O (DeepNVMe) on Penstock: the ops ``async_io``, ``gds`` and ``pin_memory``.

``install()`` before the first use, or ``penstock deepspeed -- COMMAND`` for a whole program, and
what is built on these ops, such as ZeRO-Infinity, `FastFileWriter` and ``ds_io``, moves its bytes
by `penstock.offload`. Nothing of theirs is compiled, and libaio is not needed. What goes wrong
raises; theirs looks at no completion, so that an I/O error or a short transfer counts as success.

Differences: any alignment, size and layout of a tensor is moved; ``validate=True`` raises where
what was moved is not what is stored; memory of a locked tensor is let go of with the last tensor
that lies in it, also after it was freed; where the system lets no more memory be locked, it is not
locked, and a warning says so.

Checkpoints are the business of `penstock.integrations.deepspeed.checkpoint_engine`.
"""

from penstock.integrations.deepspeed.patches import install
from penstock.integrations.deepspeed.variables import environment

__all__ = ["environment", "install"]
