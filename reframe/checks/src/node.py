"""Which node this is of how many, and how they wait for each other."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

# Of srun, of mpirun of Open MPI, of launchers that speak PMI.
_VARIABLES = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_TIMEOUT_SECONDS = 300
_POLL_SECONDS = 0.01


def place() -> tuple[int, int]:
    """The number of this node, and of how many; of one where no launcher says otherwise."""
    for index, count in _VARIABLES:
        if index in os.environ and count in os.environ:
            return int(os.environ[index]), int(os.environ[count])
    return 0, 1


def meet(work: Path, phase: str) -> None:
    """Waits until every node has come here, by files that all of them see.

    Args:
        work: The directory of the job.
        phase: What begins now; each name once.

    Raises:
        TimeoutError: A node has not come.
    """
    index, count = place()
    if count == 1:
        return
    (work / f".{phase}-{index}").touch()
    names = {f".{phase}-{one}" for one in range(count)}
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while missing := names - set(os.listdir(work)):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{len(missing)} of {count} nodes did not come to {phase}: "
                f"does every node see {work}?"
            )
        time.sleep(_POLL_SECONDS)


def tell(
    phases: dict[str, dict[str, float]], *, verified: int, to_verify: int, unit: str, **more: Any
) -> None:
    """Prints what this node found, as the check reads it: one line, at once.

    Args:
        phases: Of each its ``count`` and its ``seconds``.
        verified: What was found to be right.
        to_verify: Of so many.
        unit: What these are.
        **more: Further figures.
    """
    index, _ = place()
    found = {"node": index, "phases": phases, "verified": verified, "to_verify": to_verify}
    line = json.dumps({**found, "verified_unit": unit, **more})
    # One write, which the launcher passes on as one line.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
