"""This node's number, the number of nodes, and a barrier between them."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

# Variables of srun, of Open MPI's mpirun, and of launchers that speak PMI.
_VARIABLES = (
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_TIMEOUT_SECONDS = 300
_POLL_SECONDS = 0.01


def place() -> tuple[int, int]:
    """Returns this node's number and the number of nodes; (0, 1) without a launcher."""
    for index, count in _VARIABLES:
        if index in os.environ and count in os.environ:
            return int(os.environ[index]), int(os.environ[count])
    return 0, 1


def meet(work: Path, phase: str) -> None:
    """Waits until every node has arrived, by files in the shared directory.

    Args:
        work: The directory of the job.
        phase: Unique name of the phase that begins.

    Raises:
        TimeoutError: A node did not arrive in time.
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
    """Prints this node's results for the check to parse, as one line.

    Args:
        phases: ``count`` and ``seconds`` of each phase.
        verified: Number of items that were right.
        to_verify: Number of items that were checked.
        unit: Plural noun for the items.
        **more: Further figures.
    """
    index, _ = place()
    found = {"node": index, "phases": phases, "verified": verified, "to_verify": to_verify}
    line = json.dumps({**found, "verified_unit": unit, **more})
    # A single write, so that the launcher passes it on as one line.
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
