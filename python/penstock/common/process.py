"""Ranks as given by launchers (torchrun, mpirun, srun) in environment variables."""

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
    """The environment variables of a launcher.

    Attributes:
        rank: Holds the number of the rank.
        size: Holds the number of ranks.
        here: Each of these may hold the number of ranks on this machine.
    """

    rank: str
    size: str
    here: tuple[str, ...]


_LAUNCHERS = (
    # torchrun; scripts for other launchers often set the first two.
    _Launcher("RANK", "WORLD_SIZE", ("LOCAL_WORLD_SIZE",)),
    # Open MPI's mpirun.
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
    # Hydra of MPICH and Intel MPI, and Cray's launcher.
    _Launcher("PMI_RANK", "PMI_SIZE", ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
    # srun. Only variables of the step: a batch script, which is no rank, has the others.
    _Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", (_SLURM_TASKS,)),
)

_TASKS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)
"""One entry of srun's list of tasks per machine: ``4``, or ``4(x16)`` for 16 machines."""


class Placement(NamedTuple):
    """The place of this process among those that a launcher started together.

    Attributes:
        rank: The number of this process.
        ranks: The number of processes, at least two.
        ranks_here: The number of processes on this machine; None if unknown.
        variable: The variable that gave the rank.
    """

    rank: int
    ranks: int
    ranks_here: int | None
    variable: str


def placement(environment: Mapping[str, str] | None = None) -> Placement | None:
    """Returns the placement of this process by torchrun, mpirun or srun; None if it is alone."""
    given = os.environ if environment is None else environment
    for launcher in _LAUNCHERS:
        rank, ranks = _number(given.get(launcher.rank)), _number(given.get(launcher.size))
        if rank is not None and ranks is not None and ranks > 1:
            return Placement(rank, ranks, _ranks_here(given, ranks), launcher.rank)
    return None


def _ranks_here(given: Mapping[str, str], ranks: int) -> int | None:
    """Returns the number of ranks on this machine; None if no launcher gives it.

    Another launcher than the one that gave the rank may give it: scripts copy the numbers of `srun`
    and `mpirun` to the variables that PyTorch reads. A launcher with another number of processes
    started something else, such as one `torchrun` per machine.
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
    """Returns this machine's entry of a task list of srun such as ``2(x3),1``."""
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
    # Python refuses to parse numbers of thousands of digits.
    is_number = text is not None and text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if text is not None and is_number else None


def own_rank() -> int | None:
    """Returns the rank of this process in its job; None if it is alone."""
    dist = job()
    return None if dist is None else int(dist.get_rank())


def own_size() -> int:
    """Returns the number of processes in the job; 1 if this process is alone."""
    dist = job()
    return 1 if dist is None else int(dist.get_world_size())


def job() -> Any:
    """Returns `torch.distributed` if this process belongs to a job; else None."""
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
