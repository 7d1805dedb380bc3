"""What whoever starts ranks tells each of them, in environment variables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

_LAUNCHERS = (
    # torchrun, Open MPI, MPICH and Intel MPI, srun: rank, size, local size.
    ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
    # Those of the step: a batch script has the others, and is no rank.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)


class Placement(NamedTuple):
    """A process among those that were started with it.

    Attributes:
        rank: Its number.
        ranks: How many there are, at least two.
        ranks_here: How many of them this machine has, 1 where that is not said.
        variable: Which variable says so.
    """

    rank: int
    ranks: int
    ranks_here: int
    variable: str


def placement(environment: Mapping[str, str] | None = None) -> Placement | None:
    """This process as torchrun, mpirun or srun started it; None where it is alone.

    Args:
        environment: Variables; None for those of this process.
    """
    given = os.environ if environment is None else environment
    for rank_name, size_name, here_name in _LAUNCHERS:
        rank, size = given.get(rank_name, ""), given.get(size_name, "")
        if not rank.isdecimal() or not size.isdecimal() or int(size) < 2:
            continue
        here = given.get(here_name, "")
        # Of srun's form for several machines, "2(x3)", the first number is it.
        here = here.partition("(")[0].partition(",")[0]
        ranks_here = int(here) if here.isdecimal() else 1
        return Placement(int(rank), int(size), ranks_here, rank_name)
    return None
