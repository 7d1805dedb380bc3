"""`Checkpointing`: DLIO's checkpoint mechanism, as one Penstock checkpoint of all ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing
from dlio_benchmark.utils.utility import DLIOMPI, utcnow

from penstock.integrations.dlio.loading import load
from penstock.integrations.dlio.ranks import Ranks
from penstock.integrations.dlio.saving import save
from penstock.integrations.dlio.states import states_of
from penstock.plugin import SealingKeys

if TYPE_CHECKING:
    from typing import ClassVar


class Checkpointing(PyTorchCheckpointing):  # type: ignore[misc]
    """Saves and loads DLIO's states; DLIO makes it from the name in its run file.

    Each save is one checkpoint of all ranks, in the directory that DLIO's own mechanism fills with
    files: ``checkpoint_folder/global_epoch1_step1``. A complete checkpoint there is replaced, and
    stays until the new one is committed. A save returns when it is durable on all ranks. A load
    reads into the tensors that DLIO holds, and compares every byte with its digest. If a rank fails
    all ranks raise, so that the run ends with an error.

    Settings of the I/O are those of the environment (``PENSTOCK_…``, see `penstock.Options`). So
    are keys: ``PENSTOCK_RECIPIENTS``, a public key or the path of a file of recipients, seals each
    save, and then a load refuses clear checkpoints; ``PENSTOCK_IDENTITIES`` opens sealed ones.

    Example:
        ```yaml
        checkpoint:
          checkpoint_mechanism_classname: penstock.integrations.dlio.Checkpointing
        ```
    """

    _instance: ClassVar[Checkpointing | None] = None

    @staticmethod
    def get_instance() -> Checkpointing:
        """Returns the mechanism of this process."""
        if Checkpointing._instance is None:
            Checkpointing._instance = Checkpointing()
        return Checkpointing._instance

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        """Saves the states of all ranks, durably.

        Args:
            epoch: DLIO's epoch, for the directory's name.
            step_number: DLIO's step, for the directory's name.

        Raises:
            RankError: Another rank failed, or does not share the directory.
            StorageError: The operating system failed an operation.
        """
        ranks = self._ranks(epoch, step_number)
        keys = SealingKeys.of_environment()
        path = self._path(epoch, step_number)
        written = save(ranks, path, states_of(self, ranks.rank), keys.sealing)
        if ranks.rank == 0:
            moved = "direct" if written["direct_io"] else "buffered"
            self._say(
                f"Penstock saved {written['bytes']} bytes on rank 0, "
                f"{moved} I/O, engine {written['engine']}"
            )

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        """Loads the states of all ranks, in place.

        Args:
            epoch: DLIO's epoch, for the directory's name.
            step_number: DLIO's step, for the directory's name.

        Raises:
            CheckpointNotFoundError: There is no checkpoint.
            IncompleteCheckpointError: The save there never finished.
            CorruptCheckpointError: Bytes are damaged, or a file is missing.
            StateMismatchError: Another number of ranks saved it, or another model.
            RankError: Another rank failed.
        """
        ranks = self._ranks(epoch, step_number)
        unsealing = SealingKeys.of_environment().unsealing
        path = self._path(epoch, step_number)
        load(ranks, path, states_of(self, ranks.rank), unsealing)

    def checkpoint(self, epoch: int, step_number: int) -> None:
        """Saves as `save_checkpoint` does: the name of the method in DLIO 2.0.0."""
        self.save_checkpoint(epoch, step_number)

    def _path(self, epoch: int, step_number: int) -> str:
        return os.path.join(self.args.checkpoint_folder, f"global_epoch{epoch}_step{step_number}")

    def _ranks(self, epoch: int, step_number: int) -> Ranks:
        return Ranks(DLIOMPI.get_instance().comm(), self._path(epoch, step_number))

    def _say(self, text: str) -> None:
        logger = getattr(self.args, "logger", None)
        if logger is not None:
            logger.output(f"{utcnow()} {text}")
