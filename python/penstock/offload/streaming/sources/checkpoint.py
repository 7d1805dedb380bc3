"""Penstock checkpoints as a source of weights: leased, read in place, and verified."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock import _native
from penstock.checkpoint.loading.opened import CHUNK_BYTES, OpenCheckpoint
from penstock.checkpoint.loading.placed import placed
from penstock.checkpoint.state.tree.names import containers, escaped, unescaped
from penstock.checkpoint.steps.newest import open_newest
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.io.files.extents import FileRange, JoinedExtent, TensorExtent, Weights
from penstock.io.files.file_marks import FileMark
from penstock.sealing.unsealing import CLEAR
from penstock.tensors import dtypes
from penstock.tensors.memory import of_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.checkpoint.loading.placed import PlacedTensor
    from penstock.sealing.unsealing import Unsealing

_SHOWN_MAX = 5


def weights_of_checkpoint(
    path: str, model: Any, key: str | None, unsealing: Unsealing = CLEAR
) -> Weights:
    """Locates a model's weights in a checkpoint, which is held as long as the result exists.

    Args:
        path: The directory of a checkpoint, or of a store, whose newest complete step is used.
        model: A module.
        key: Key of the state under which the parameters are, as ``"model"``; empty if they are the
            state itself. None searches for the place that has all of them.
        unsealing: How a sealed checkpoint is opened.
    """
    checkpoint = open_newest(path, stacklevel=4, unsealing=unsealing)
    try:
        return _weights(checkpoint, model, key, is_signed=unsealing.signers is not None)
    except BaseException:
        # A stored exception keeps this frame alive, which must not keep the files from removal.
        checkpoint.release()
        raise


def _weights(
    checkpoint: OpenCheckpoint, model: Any, key: str | None, *, is_signed: bool
) -> Weights:
    checkpoint.view_as(0)
    with checkpoint.reading():
        tensors = {one.name: one for one in placed(checkpoint)}
    prefix = _prefix(checkpoint.path, model, tensors, key)
    names = dict(model.named_parameters(remove_duplicate=False))
    names.update(model.named_buffers(remove_duplicate=False))
    found = {
        name: _stored(checkpoint.path, one)
        for name in names
        if (one := tensors.get(prefix + escaped(name))) is not None
        and not one.dtype.startswith("numpy:")
    }
    paths = {run.path for one in found.values() for run in one.runs}
    marks = {one: FileMark.of(os.stat(one)) for one in sorted(paths)}
    if checkpoint.is_sealed:
        return Weights(found, marks, None, _Chunks(checkpoint, is_signed=is_signed))
    return Weights(found, marks, _Digests(checkpoint, is_signed=is_signed))


class _Digests:
    """The digests of a checkpoint that stays open, so that nobody removes its files."""

    chunk_bytes = CHUNK_BYTES

    def __init__(self, checkpoint: OpenCheckpoint, *, is_signed: bool) -> None:
        self._checkpoint = checkpoint
        self.is_signed = is_signed

    def check(self, path: str, start: int, pieces: Sequence[Any], wanted: tuple[int, int]) -> None:
        memories = [of_tensor(piece, "the piece") for piece in pieces]
        self._checkpoint.check(os.path.basename(path), start, memories, wanted)


class _Chunks(_Digests):
    """The chunks of a sealed checkpoint, which stays open likewise."""

    def open(self, path: str, start: int, pieces: Sequence[Any], wanted: tuple[int, int]) -> None:
        memories = [of_tensor(piece, "the piece") for piece in pieces]
        if self.is_signed:
            # Signed are the sealed bytes.
            self._checkpoint.check(os.path.basename(path), start, memories, wanted)
        self._checkpoint.open_chunks(os.path.basename(path), start, memories, wanted)


def _prefix(path: str, model: Any, tensors: Mapping[str, Any], key: str | None) -> str:
    """The prefix of the names of the model's parameters in the state."""
    if key is not None:
        return f"{_container(key, tensors)}." if key else ""
    # Any name of a tied parameter will do.
    owners: dict[str, int] = {
        escaped(name): id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    held: dict[str, set[int]] = {}
    for stored in tensors:
        for place in ("", *containers(stored)):
            inner = stored[len(place) + 1 :] if place else stored
            if (owner := owners.get(inner)) is not None:
                held.setdefault(place, set()).add(owner)
    count = len(set(owners.values()))
    whole = sorted(place for place, found in held.items() if len(found) == count)
    if len(whole) == 1:
        return f"{whole[0]}." if whole[0] else ""
    if whole:
        shown = ", ".join(f"key={place!r}" for place in whole[:_SHOWN_MAX])
        raise StateMismatchError(
            f"{path}: the state has the parameters of the model in {len(whole)} places: choose one"
            f" of {shown}",
            key=whole[0],
            path=path,
        )
    if not held:
        raise StateMismatchError(
            f"{path}: the state has no tensor with the name of a parameter of the model, such as"
            f" {next(iter(owners), '')!r}",
            path=path,
        )
    best = max(sorted(held), key=lambda place: len(held[place]))
    lacking = [name for name, owner in owners.items() if owner not in held[best]]
    shown = ", ".join(lacking[:_SHOWN_MAX])
    more = f" and {len(lacking) - _SHOWN_MAX} more" if len(lacking) > _SHOWN_MAX else ""
    where = f" under {best!r}" if best else ""
    raise StateMismatchError(
        f"{path}: the state has no place with all parameters of the model; what it has{where} lacks"
        f" {shown}{more}",
        key=lacking[0],
        path=path,
    )


def _container(key: str, tensors: Iterable[str]) -> str:
    """The name of a container: the key itself, or its escaped form in the state."""
    listed = list(tensors)
    if any(name.startswith(f"{key}.") for name in listed):
        return key
    above = (place for name in listed for place in containers(name))
    return next((place for place in above if unescaped(place) == key), key)


def _stored(path: str, one: PlacedTensor) -> TensorExtent:
    runs = one.runs
    dtype = dtypes.any_torch_dtype(one.dtype)
    if runs is None:
        raise UnsupportedStateError(
            f"{path}: the bytes of {one.name!r} are scattered, as those of a transposed view, or of"
            " boxes that ranks have cut along an inner dimension: have one process load the"
            " checkpoint and save contiguous tensors, and stream that",
            key=one.name,
        )
    if not runs:
        # A tensor without elements has no bytes in any file.
        return TensorExtent(os.path.join(path, _native.MANIFEST), 0, one.shape, dtype)
    first, places = runs[0], tuple(FileRange(run.file, run.begin, run.nbytes) for run in runs)
    if len(runs) == 1:
        return TensorExtent(first.file, first.begin, one.shape, dtype)
    return JoinedExtent(first.file, first.begin, one.shape, dtype, places=places)
