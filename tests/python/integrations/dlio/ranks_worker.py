"""Two ranks that fail with errors of every kind: each kind fails both, and neither waits."""

from __future__ import annotations

import sys
import threading

from mpi4py import MPI

from penstock.errors import CheckpointNotFoundError, RankError
from penstock.integrations.dlio.ranks import Ranks

WORLD = MPI.COMM_WORLD
PATH = "/run/global_epoch1_step7"


class NotPickledError(Exception):
    """An error that holds more than can be sent to another rank."""

    def __init__(self) -> None:
        super().__init__("no space left")
        self.lock = threading.Lock()


class NotUnpickledError(Exception):
    """An error that can be sent, and not be made again from what was sent."""

    def __init__(self, reason: str, *, place: str) -> None:
        super().__init__(f"{reason} at {place}")


ERRORS = (
    NotPickledError(),
    NotUnpickledError("no space left", place="node 3"),
    OSError(28, "no space left"),
)


def refusal(call, *arguments):
    """The error of this rank."""
    try:
        call(*arguments)
    except Exception as error:
        return error
    return None


def main() -> None:
    ranks = Ranks(WORLD, PATH)
    for own in ERRORS:
        for failing, call in ((0, ranks.on_first), (0, ranks.on_each), (1, ranks.on_each)):

            def work(own=own, failing=failing):
                if WORLD.rank == failing:
                    raise own
                return WORLD.rank

            found = refusal(call, work)
            if WORLD.rank == failing:
                assert found is own, repr(found)
            else:
                assert type(found) is RankError, repr(found)
                expected = f"{PATH}: rank {failing} failed: {type(own).__name__}: {own}"
                assert (str(found), found.rank) == (expected, failing)

    def missing():
        raise CheckpointNotFoundError(f"{PATH} is not there", path=PATH)

    found = refusal(ranks.on_first, missing)
    assert (type(found), found.path) == (CheckpointNotFoundError, PATH), repr(found)
    assert ranks.on_first(lambda: 7) == 7
    assert ranks.on_each(lambda: WORLD.rank) == ([0, 1] if WORLD.rank == 0 else [])
    sys.stdout.write("HELD\n")


main()
