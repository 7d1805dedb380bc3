"""DLIO and MLPerf Storage's checkpoint benchmark, with checkpoints and samples moved by Penstock.

DLIO finds the classes by their names, in its run file: `Checkpointing` as
``checkpoint.checkpoint_mechanism_classname``, `NPYReader`, `NPZReader` and `IndexedBinaryReader` as
``reader.reader_classname``.
"""

from penstock.integrations.dlio import fitting

fitting.check()

from penstock.integrations.dlio.checkpointing import Checkpointing  # noqa: E402
from penstock.integrations.dlio.readers import (  # noqa: E402
    IndexedBinaryReader,
    NPYReader,
    NPZReader,
)

__all__ = ["Checkpointing", "IndexedBinaryReader", "NPYReader", "NPZReader"]
