"""DeepSpeed's tensor I/O (DeepNVMe) on Penstock: the ops ``async_io``, ``gds`` and ``pin_memory``.

Call ``enable()`` before the first use, or run a whole program with ``penstock deepspeed --
COMMAND``: everything built on these ops, such as ZeRO-Infinity, `FastFileWriter` and ``ds_io``,
    then
moves its bytes through `penstock.offload`. None of DeepSpeed's ops is compiled, and libaio is not
needed. Failures raise; DeepSpeed's ops ignore completions, so that an I/O error or a short transfer
counts as success.

Differences: tensors of any alignment, size and layout are moved; ``validate=True`` raises if the
stored bytes are not those that were moved; the memory of a locked tensor is released with the last
tensor that uses it, even after it was freed; if the system allows no more locked memory, the tensor
is not locked, and a warning says so.

For checkpoints see `penstock.integrations.deepspeed.checkpoint_engine`.
"""

from penstock.integrations.deepspeed.patches import enable
from penstock.integrations.deepspeed.variables import environment

__all__ = ["enable", "environment"]
