"""`Ranks`: the ranks of an MPI run, which go on together or fail together.

DLIO has no process group of `torch.distributed`. If one rank fails alone, the others wait for it in
their next barrier, so every step here ends in one outcome for all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import PenstockError, RankError, is_true_for_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py.MPI import Comm

_T = TypeVar("_T")


class Ranks:
    """All ranks of a communicator, at work on one checkpoint.

    Args:
        comm: The communicator.
        path: The checkpoint's directory, for errors.
    """

    def __init__(self, comm: Comm, path: str) -> None:
        self._comm = comm
        self._path = path
        self.rank: int = comm.rank
        self.count: int = comm.size

    def on_first(self, work: Callable[[], _T]) -> _T:
        """Runs a step on rank 0, and returns its value on all ranks.

        Raises:
            RankError: It failed; rank 0 raises the error itself, as all ranks do for one that is
                true for all.
        """
        own, error = _outcome(work) if self.rank == 0 else (None, None)
        value: _T
        value, failure = self._comm.bcast((own, self._of_others(error)), root=0)
        _check(failure, error)
        return value

    def on_each(self, work: Callable[[], _T]) -> list[_T]:
        """Runs a step on every rank, and returns the values of all on rank 0.

        Returns:
            The values in the order of the ranks; nothing on other ranks.

        Raises:
            RankError: It failed on another rank; the rank itself raises its own error.
        """
        value, error = _outcome(work)
        outcomes = self._comm.gather((value, self._of_others(error)), root=0) or []
        failure = next((one for _, one in outcomes if one is not None), None)
        _check(self._comm.bcast(failure, root=0), error)
        return [one for one, _ in outcomes]

    def _of_others(self, error: Exception | None) -> PenstockError | None:
        """The error that the other ranks raise for one of this rank; it can be pickled."""
        if error is None or (
            isinstance(error, PenstockError) and is_true_for_all_ranks(type(error))
        ):
            return error
        return RankError(
            f"{self._path}: rank {self.rank} failed: {type(error).__name__}: {error}",
            rank=self.rank,
        )


def _check(failure: PenstockError | None, own: Exception | None) -> None:
    """Raises this rank's own error, or the one of another rank."""
    error = failure if own is None else own
    if error is not None:
        raise error


def _outcome(work: Callable[[], _T]) -> tuple[Any, Exception | None]:
    """The value of a step, or its error."""
    try:
        return work(), None
    except Exception as error:
        return None, error
