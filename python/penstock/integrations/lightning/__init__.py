"""Lightning (`Trainer` and `Fabric`), with Penstock as its storage.

Pass `PenstockIO` to ``Trainer(plugins=[…])`` or ``Fabric(plugins=[…])``. For models sharded over
ranks use `PenstockModelParallelStrategy` instead of Lightning's. Importing this package
changes nothing in Lightning but how `LightningCLI` reads the hyper-parameters of checkpoints that
are directories; making one of them does, as does `enable`.

Example:
    >>> import tempfile, torch
    >>> from lightning.fabric import Fabric
    >>> from penstock.integrations.lightning import PenstockIO
    >>> fabric = Fabric(accelerator="cpu", devices=1, plugins=[PenstockIO()])
    >>> path = tempfile.mkdtemp() + "/step-10.ckpt"
    >>> fabric.save(path, {"model": torch.nn.Linear(2, 2), "step": 10})
    >>> fabric.load(path)["step"]
    10
"""

from penstock.integrations.versions import check_version

check_version("lightning", "2.5", "2.6")

from penstock.integrations.lightning import fitting  # noqa: E402

fitting.check()

# These register their replacements.
from penstock.integrations.lightning import cli, loggers, patches  # noqa: E402, F401
from penstock.integrations.lightning.checkpoint_io import PenstockIO  # noqa: E402
from penstock.integrations.lightning.enable import enable  # noqa: E402
from penstock.integrations.lightning.paced import PacedCheckpoint  # noqa: E402
from penstock.integrations.lightning.strategies import (  # noqa: E402
    PenstockModelParallelStrategy,
    ShardedCheckpoints,
)

cli.replace()

__all__ = [
    "PacedCheckpoint",
    "PenstockIO",
    "PenstockModelParallelStrategy",
    "ShardedCheckpoints",
    "enable",
]
