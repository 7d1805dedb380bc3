"""What whoever starts ranks tells each of them, in environment variables."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

import sys
from typing import TYPE_CHECKING, Any

_SLURM_TASKS = "SLURM_STEP_TASKS_PER_NODE"


class _Launcher(NamedTuple):
    """The variables of a launcher.

    Attributes:
        rank: The number of the rank.
        size: How many ranks there are.
        here: How many of them this machine has; any of these.
    """

    rank: str
    size: str
    here: tuple[str, ...]


_LAUNCHERS = (
    # torchrun; scripts for other launchers often set the first two.
    _Launcher("RANK", "WORLD_SIZE", ("LOCAL_WORLD_SIZE",)),
    # Open MPI's mpirun.
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    # That of MPICH and of Intel, and of Cray.
    _Launcher("PMI_RANK", "PMI_SIZE", ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
    # srun. Those of the step: a batch script has the others, and is no rank.
    _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", (_SLURM_TASKS,)),
)

_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
"""Of srun's list of tasks on each machine, one entry: ``4``, or ``4(x16)`` for 16 machines."""


class Placement(NamedTuple):
    """A process among those that were started with it.

    Attributes:
        rank: Its number.
        ranks: How many there are, at least two.
        ranks_here: How many of them this machine has; None where that is not said.
        variable: Which variable says so.
    """

    rank: int
    ranks: int
    ranks_here: int | None
    variable: str


def placement(environment: Mapping[str, str] | None = None) -> Placement | None:
    """This process as torchrun, mpirun or srun started it; None where it is alone.

    Args:
        environment: Variables; None for those of this process.
    """
    given = os.environ if environment is None else environment
    for launcher in _LAUNCHERS:
        rank, ranks = _number(given.get(launcher.rank)), _number(given.get(launcher.size))
        if rank is not None and ranks is not None and ranks > 1:
            return Placement(rank, ranks, _ranks_here(given, ranks), launcher.rank)
    return None


def _ranks_here(given: Mapping[str, str], ranks: int) -> int | None:
    """How many of so many ranks this machine has; None where nobody says it.

    Whoever names the rank need not be the one who says that: scripts copy the numbers of `srun` and
    `mpirun` to where PyTorch looks for them. A launcher of another number of processes started
    something else, such as one `torchrun` for each machine.
    """
    for launcher in _LAUNCHERS:
        if _number(given.get(launcher.size)) != ranks:
            continue
        for name in launcher.here:
            text = given.get(name)
            found = _tasks_here(given, text) if name == _SLURM_TASKS else _number(text)
            if found is not None and 1 <= found <= ranks:
                return found
    return None


def _tasks_here(given: Mapping[str, str], text: str | None) -> int | None:
    """Of a list as srun has it, ``2(x3),1``, the number of the machine that this is."""
    entries = [_TASKS.fullmatch(entry) for entry in (text or "").split(",")]
    node = _number(given.get("SLURM_NODEID"))
    if node is None and len(entries) > 1:
        return None
    nodes = 0
    for entry in entries:
        if entry is None:
            return None
        nodes += int(entry[2] or 1)
        if node is None or node < nodes:
            return int(entry[1])
    return None


def _number(text: str | None) -> int | None:
    # Python refuses to read numbers of thousands of digits.
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if text is not None and is_number else None


def own_rank() -> int | None:
    """The number of this process in its job; None where it has none."""
    dist = job()
    return None if dist is None else int(dist.get_rank())


def own_size() -> int:
    """How many processes the job of this one has; 1 where it is alone."""
    dist = job()
    return 1 if dist is None else int(dist.get_world_size())


def job() -> Any:
    """`torch.distributed` where this process is one of a job; else None."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
