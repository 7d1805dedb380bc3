"""The durable generation of an optimizer state: a checkpoint that links the state's files.

It is committed like any checkpoint, in place of the one before: at any time one of the two is
there, complete. Recovery links its files back.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock import _native
from penstock.checkpoint.loading.load import LoadRequest, read
from penstock.checkpoint.loading.opened import OpenCheckpoint
from penstock.checkpoint.state.flatten import flatten
from penstock.common.process import own_size
from penstock.errors import SealedError, StateMismatchError
from penstock.offload.optim.adopt_links import adopt_links
from penstock.sealing.sealing_keys import SealingKeys
from penstock.sealing.unsealing import CLEAR, Unsealing
from penstock.tensors.arguments import to_native
from penstock.tensors.native_rows import Linked, LinkedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.offload.optim.layout import StateSegment
    from penstock.offload.optim.state import StoredState
    from penstock.tensors.file_tensor import FileTensor
    from penstock.tensors.native_rows import LinkedTensor

_STEPS_MAX = 1 << 53
"""Largest count of steps: counts are floats."""


class Recovered(NamedTuple):
    """A generation that was found.

    Attributes:
        moments: The moments of each parameter that has some, by its number.
        steps: The number of steps that each has made.
    """

    moments: Mapping[int, Mapping[str, FileTensor]]
    steps: Mapping[int, float]


class _Flat(NamedTuple):
    """The description shared by all generations in which the same parameters have a state.

    Attributes:
        tree: The structure.
        tensors: Linked tensors, each with the index of its file.
        files: The segment of each file, and its index there.
    """

    tree: str
    tensors: list[LinkedTensor]
    files: list[tuple[StateSegment, int]]


def keys_of(sealing: Any, identities: Any) -> SealingKeys:
    """The keys of an optimizer by its arguments ``sealing`` and ``identities``."""
    keys = SealingKeys.of(sealing, identities)
    if keys.is_demanded and keys.sealing is None:
        raise ValueError(
            "identities= without sealing=: what they open would be written in the clear"
        )
    return keys


class Generation:
    """Generations of a state, each replacing the one before."""

    def __init__(self, kind: str, stored: StoredState, keys: SealingKeys) -> None:
        self._kind = kind
        self._stored = stored
        self._keys = keys
        self._numbers: list[int] = []
        self._flat: _Flat | None = None

    def draw_key(self) -> _native.AttemptKey | None:
        """Draws the key of the next generation; None for a clear one.

        Raises:
            KmsError: A key management service that wraps it was not reachable.
        """
        return None if self._keys.sealing is None else self._keys.sealing.wrap_new()

    def commit(self, path: str, steps: Mapping[int, float], key: _native.AttemptKey | None) -> None:
        """Commits the present state as the generation to find after a crash."""
        numbers = list(steps)
        # Describes tens of thousands of small tensors once, not at each step.
        if self._flat is None or numbers != self._numbers:
            self._numbers, self._flat = numbers, self._flattened(numbers)
        tree, tensors, places = self._flat
        held = [self._stored.file(segment, index) for segment, index in places]
        files = [LinkedFile(one.path, one.nbytes, list(one.chunks), one, one.seal) for one in held]
        note = {
            "optimizer": self._kind,
            "ranks": own_size(),
            "steps": {str(number): count for number, count in steps.items()},
        }
        _native.save(
            path,
            [],
            [],
            tree,
            linked=Linked(files, tensors),
            step=None,
            metadata=json.dumps(note),
            overwrite=True,
            sealing=key,
            options=to_native(None),
            progress=None,
        )

    def _flattened(self, numbers: list[int]) -> _Flat:
        state = _each(
            self._stored, numbers, lambda number, moment: self._stored.tensor(number, moment, None)
        )
        flat = flatten({"state": state})
        files, tensors = flat.linked
        segments = dict.fromkeys(map(self._stored.segment_of, numbers))
        place_of = {
            id(self._stored.file(segment, index)): (segment, index)
            for segment in segments
            for index in range(len(segment.moments))
        }
        return _Flat(flat.tree, tensors, [place_of[id(held.owner)] for held in files])

    def recover(self, path: str, count: int) -> Recovered | None:
        """Takes over the generation at a path into files of the state; None if there is none."""
        if not os.path.exists(os.path.join(path, _native.MANIFEST)):
            return None
        unsealing = CLEAR if self._keys.sealing is None else self._keys.unsealing
        source = self._opened(path, unsealing)
        try:
            with source.reading():
                steps = self._steps(path, source.metadata(), count)
            state_import = adopt_links(source, self._stored, steps)
        finally:
            source.release()
        if state_import is not None:
            moments = _each(
                self._stored,
                steps,
                lambda number, moment: state_import.tensor(number, moment, None),
            )
        else:
            targets = _each(
                self._stored,
                steps,
                lambda number, moment: self._stored.target(number, moment, None),
            )
            request = LoadRequest(into={"state": targets}, rank=0, unsealing=unsealing)
            moments = read(path, request, None).state["state"]
        return Recovered({int(number): one for number, one in moments.items()}, steps)

    def _opened(self, path: str, unsealing: Unsealing) -> OpenCheckpoint:
        try:
            return OpenCheckpoint(path, unsealing=unsealing)
        except SealedError as error:
            if self._keys.can_open:
                raise
            raise SealedError(
                f"{path} is sealed: make the optimizer with sealing= and identities= to recover it",
                path=path,
            ) from error

    def _steps(self, path: str, note: Mapping[str, Any], count: int) -> dict[int, float]:
        """The steps of each parameter, if the generation fits the optimizer; raises otherwise."""
        kind, ranks, steps = note.get("optimizer"), note.get("ranks"), note.get("steps")
        if kind != self._kind or not isinstance(steps, dict):
            raise StateMismatchError(
                f"{path} is of {kind}, not of {self._kind}", key="optimizer", path=path
            )
        # Generations of earlier versions lack it.
        if ranks is not None and ranks != own_size():
            raise StateMismatchError(
                f"{path} is that of one of {ranks} rank{'s'[: ranks != 1]}, and this is one of"
                f" {own_size()}: load a checkpoint, which any number of ranks can",
                key="ranks",
                path=path,
            )
        known = {str(number): number for number in range(count)}
        if unknown := sorted(steps.keys() - known.keys()):
            raise StateMismatchError(
                f"{path} has parameter {unknown[0]}, the optimizer {count}",
                key=unknown[0],
                path=path,
            )
        return {known[number]: _made(made, number, path) for number, made in steps.items()}


def _made(steps: Any, number: str, path: str) -> float:
    """The number of steps of a parameter, read from a generation."""
    if type(steps) in (int, float) and 0 <= steps <= _STEPS_MAX:
        return float(steps)
    raise StateMismatchError(
        f"{path} says that parameter {number} has made {steps!r:.40} steps: load a checkpoint",
        key=f"steps.{number}",
        path=path,
    )


def _each(
    stored: StoredState, numbers: Iterable[int], made: Callable[[int, str], Any]
) -> dict[str, dict[str, Any]]:
    """A value for each moment of each parameter, by number and name."""
    return {
        str(number): {moment: made(number, moment) for moment in stored.segment_of(number).moments}
        for number in numbers
    }
