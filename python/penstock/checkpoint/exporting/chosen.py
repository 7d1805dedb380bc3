"""Selects the tensors of a checkpoint to export, and their exported names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checkpoint.saving.groups import IN_PLACE, Groups
from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.state.tree.names import containers, plain_text, unescaped
from penstock.errors import StateMismatchError
from penstock.tensors import dtypes

if TYPE_CHECKING:
    import torch

    from penstock.checkpoint.loading.opened import OpenCheckpoint, StoredTensor

_RESERVED = "__metadata__"
_KEYS = ("model", "module", "state_dict", "model_state_dict")
"""Usual keys of the model in a state, tried if the caller gives none."""


class Weight(NamedTuple):
    """A tensor to export.

    Attributes:
        name: Its exported name.
        node: Its node in the checkpoint's tree.
        dtype: Name of its type.
        nbytes: Bytes of its elements.
        is_window: Whether it is a part of another tensor.
        shape: Its sizes.
        kind: Its type.
        stored: The stored tensor that it is, or is a part of.
        start: Index of its first element in the stored tensor.
        sizes: Its sizes in the stored tensor: `shape`, with dimensions of size one that it omits.
        is_renamed: Whether the export removes words from its name, taken for a wrapper's.
    """

    name: str
    node: dict[str, Any]
    dtype: str
    nbytes: int
    is_window: bool
    shape: tuple[int, ...]
    kind: torch.dtype
    stored: StoredTensor
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    is_renamed: bool


class Shards(NamedTuple):
    """Shards that are files of a model as they are.

    Attributes:
        files: Their names.
        file_of: The file of each tensor, by its name in there.
        dtypes: Names of the types of all.
        total_bytes: Bytes of all tensors.
    """

    files: list[str]
    file_of: dict[str, str]
    dtypes: set[str]
    total_bytes: int


def group_of(checkpoint: OpenCheckpoint, group: str | None, key: str | None) -> str | None:
    """Returns the group to export; None if a key selects the tensors, or nothing does."""
    found = {entry.group for entry in checkpoint.native.grouped()}
    if group is not None:
        if group not in found:
            told = ", ".join(map(repr, sorted(found))) or "none"
            raise StateMismatchError(
                f"{checkpoint.path} has no group {group!r}: it has {told}; "
                "--key NAME exports what is below a key of the state",
                path=checkpoint.path,
            )
        return group
    return IN_PLACE if key is None and IN_PLACE in found else None


def shards_of(checkpoint: OpenCheckpoint, group: str) -> Shards | None:
    """Returns the shards of a group, if they hold each of its tensors whole, with its own type."""
    tensors = checkpoint.native.tensors()
    wholes = {box.index: box.shape for box in checkpoint.native.boxes()}
    carried = set(checkpoint.native.carried())
    file_of: dict[str, str] = {}
    kinds, total_bytes = set(), 0
    for one in checkpoint.native.grouped():
        if one.group != group:
            continue
        entry = tensors[one.index]
        if wholes.get(one.index, entry.shape) != entry.shape:
            return None
        if one.name in file_of or one.index in carried:
            return None
        file_of[one.name] = entry.file
        kinds.add(entry.dtype)
        total_bytes += entry.end - entry.begin
    used = set(file_of.values())
    others = {entry.file for entry in tensors if entry.file in used}
    files = [name for name, _ in checkpoint.native.files() if name in others]
    return Shards(files, file_of, kinds, total_bytes)


def weights_of(checkpoint: OpenCheckpoint, group: str | None, key: str | None) -> list[Weight]:
    """Returns the tensors of a group, or below a key of the state, each once, in order.

    Args:
        checkpoint: A checkpoint viewed as a rank.
        group: The group's name; tensors without bytes of their own (windows, tied tensors, empty
            ones) are included.
        key: Dotted name; None for a usual key of models, or for the whole state.
    """
    path = checkpoint.path
    leaves = [
        (name, checkpoint.tensor(node), node)
        for name, node in tree.leaves(checkpoint.root)
        if type(node) is dict and node.get("$") in ("tensor", "ndarray")
    ]
    known: dict[object, str] = {}
    if group is not None:
        known = _names_in(checkpoint, group)
        key = _prefix(leaves, known)
    elif key is None:
        key = _key(checkpoint, [name for name, _, _ in leaves])
    groups = Groups({} if key is None else {key: IN_PLACE}).among(label for label, _, _ in leaves)
    members = groups.members(label for label, _, _ in leaves)
    weights: list[Weight] = []
    label_of: dict[str, str] = {}
    seen: set[object] = set()
    for label, stored, node in leaves:
        window = None if stored.window is None else _hashable(stored.window)
        member = members.get(label)
        name = known.get(stored.of) if window is None else None
        if name is None and member is not None:
            name = plain_text(unescaped(member.name))
        if name is None or (stored.of, window) in seen:
            # Readers know which tensors are tied.
            continue
        seen.add((stored.of, window))
        if name in label_of or name == _RESERVED:
            other = label_of.get(name, name)
            raise StateMismatchError(
                f"{path}: {other} and {label} would both be called {name!r}: name a longer --key",
                key=label,
                path=path,
            )
        label_of[name] = label
        shape = tuple(stored.shape if stored.window is None else stored.window[0])
        kind = _kind(stored.dtype, shape, label, path)
        nbytes = math.prod(shape) * kind.itemsize
        start = (0,) * len(shape)
        weights.append(
            Weight(
                name,
                node,
                stored.dtype,
                nbytes,
                window is not None,
                shape,
                kind,
                stored,
                start,
                sizes=shape,
                is_renamed=group is None
                and name != plain_text(unescaped(groups.inner(label) or "")),
            )
        )
    if not weights:
        raise StateMismatchError(
            f"{path} has no tensors below {key!r}: `penstock inspect` lists what it has",
            key=key,
            path=path,
        )
    return weights


def _names_in(checkpoint: OpenCheckpoint, group: str) -> dict[object, str]:
    """Returns the name of each tensor of a group in its shards, by the reference of its leaf."""
    wholes = {box.index: box.tensor for box in checkpoint.native.boxes()}
    found: dict[object, str] = {}
    for one in checkpoint.native.grouped():
        if one.group == group:
            of = wholes.get(one.index, one.index)
            # If a rank has several pieces, all but the first have a number as suffix.
            found[of] = min(found.get(of, one.name), one.name, key=len)
    return found


def _prefix(leaves: list[tuple[str, StoredTensor, Any]], known: dict[object, str]) -> str | None:
    """Returns the dotted name from which a group was made, as far as its tensors show."""
    labels: dict[object, list[str]] = {}
    for label, stored, _ in leaves:
        if stored.window is None and stored.of in known:
            labels.setdefault(stored.of, []).append(label)
    above = [
        {one for label in each for one in ("", *containers(label))} for each in labels.values()
    ]
    every = [label for label, _, _ in leaves]
    for prefix in sorted(set.intersection(*above) if above else (), key=len, reverse=True):
        members = Groups({prefix: IN_PLACE}).members(every)
        if all(
            any(label in members and unescaped(members[label].name) == known[of] for label in each)
            for of, each in labels.items()
        ):
            return prefix
    return None


def _key(checkpoint: OpenCheckpoint, names: list[str]) -> str:
    """Returns the key of the model if the caller gives none."""
    top = {name.partition(".")[0] for name in names}
    found = [key for key in _KEYS if key in top]
    if len(found) == 1 and any(name.startswith(f"{found[0]}.") for name in names):
        return found[0]
    plain = next(tree.leaves(checkpoint.root), None)
    if not found and plain is not None and _is_all_tensors(checkpoint):
        return ""
    raise StateMismatchError(
        f"{checkpoint.path}: nothing tells which tensors are the model's: name them with --key; "
        f"the state has {', '.join(sorted(top)[:20]) or 'no tensors'}",
        path=checkpoint.path,
    )


def _is_all_tensors(checkpoint: OpenCheckpoint) -> bool:
    return all(
        type(node) is dict and node.get("$") in ("tensor", "ndarray")
        for _, node in tree.leaves(checkpoint.root)
    )


def _hashable(window: Any) -> tuple[Any, ...]:
    shape, strides, offset = window
    return (tuple(shape), tuple(strides), offset)


def _kind(dtype: str, shape: tuple[int, ...], label: str, path: str) -> torch.dtype:
    known = dtypes.torch_dtypes().get(dtype)
    if known is None or dtypes.header_entry(dtype, shape) is None:
        raise StateMismatchError(
            f"{path}: {label} has elements of type {dtype} in the shape {list(shape)}, which "
            "safetensors has no name for: leave it out with a longer --key",
            key=label,
            path=path,
        )
    return known
