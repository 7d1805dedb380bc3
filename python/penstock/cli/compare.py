"""Compares two checkpoints name by name.

Tensors are compared by their bytes, so that a nan equals itself and -0.0 differs from 0.0, and are
read in groups of bounded size. Digests could not decide it: they cover chunks of a file, and equal
tensors of two checkpoints may be at different offsets.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import penstock
from penstock.checkpoint.loading.opened import OpenCheckpoint
from penstock.checkpoint.state.tree import tree
from penstock.checkpoint.state.tree.plain import plain
from penstock.cli.elements import Difference, Kind, difference, kind
from penstock.sealing.unsealing import Unsealing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.sealing import Identities

GROUP_BYTES_MAX = 128 << 20
"""Most tensor data of each checkpoint in memory at a time, unless a single tensor is larger."""

REPEATS_MAX = 64
"""Repetitions of a tensor's bytes up to which a window is compared element by element, as those of
`torch.Tensor.unfold` repeat them. A file of kilobytes may hold windows of any size."""
ELEMENTS_MIN = 1 << 24
"""Elements that are compared for any tensor, however often it repeats its bytes."""

PLAIN = Kind("plain leaf", ())


class Side:
    """One of the checkpoints that are compared.

    Attributes:
        path: Its directory.
        targets: The stored tensor's name for each name of a tensor or an alias.
        values: Plain leaves by name.
        names: All of these names.
    """

    def __init__(self, path: str, identities: Identities | None = None) -> None:
        info = penstock.inspect(path)
        # One side may be clear: identities that are passed would refuse it.
        self._identities = identities if info.is_closed else None
        if self._identities is not None:
            info = penstock.inspect(path, identities=self._identities)
        self.path = info.path
        self.values = info.values()
        # Of values that each rank has, `load` returns those of the first rank.
        self._stored = {tensor.name: tensor for tensor in info.tensors if not tensor.rank}
        self._position = _positions(self.path, self._identities)
        self.targets = {**{name: name for name in self._stored}, **info.aliases}
        self.names = {*self.targets, *self.values}

    def kind(self, name: str) -> Kind | None:
        """The kind of a name's value; None for an alias, whose kind is known once it is read."""
        if name in self._stored:
            return Kind(self._stored[name].dtype, self._stored[name].shape)
        return None if name in self.targets else PLAIN

    def bytes_of(self, name: str) -> int:
        """Bytes read for a tensor or an alias."""
        return self._stored[self.targets[name]].bytes

    def read(self, names: Sequence[str]) -> dict[str, Any]:
        """Reads stored tensors, or one alias."""
        state = penstock.load(self.path, keys=names, plain=True, identities=self._identities)
        # A partial state omits list entries, so values match names only by their order.
        ordered = sorted(names, key=self._position.__getitem__)
        return dict(zip(ordered, _leaves(state), strict=True))


def compare_checkpoints(
    path_a: str,
    path_b: str,
    progress: Callable[[int, int], object],
    identities: Identities | None = None,
) -> dict[str, Any]:
    """Every difference between two checkpoints, with the keys of `penstock diff --json`."""
    a, b = Side(path_a, identities), Side(path_b, identities)
    changed = [
        _changed(name, kind_a, kind_b)
        for name in sorted(a.names & b.names)
        if (kind_a := a.kind(name)) != (kind_b := b.kind(name)) and kind_a and kind_b
    ]
    skipped = {row["name"] for row in changed}
    common = [name for name in a.targets if name in b.targets and name not in skipped]
    compared_bytes, total_bytes = 0, sum(map(a.bytes_of, common))
    tensors = []
    for group in _groups(a, b, common):
        read_a, read_b = a.read(group), b.read(group)
        for name in group:
            value_a, value_b = read_a.pop(name), read_b.pop(name)
            if kind(value_a) != kind(value_b):
                changed.append(_changed(name, kind(value_a), kind(value_b)))
                continue
            found = _difference(a, b, name, value_a, value_b)
            if found.differing:
                tensors.append({"name": name, **asdict(found)})
        compared_bytes += sum(map(a.bytes_of, group))
        progress(compared_bytes, total_bytes)
    differences = {
        "only_in_a": sorted(a.names - b.names),
        "only_in_b": sorted(b.names - a.names),
        "changed": changed,
        "ties": _ties(a, b),
        "values": _values(a, b),
        "tensors": tensors,
    }
    return {
        "a": a.path,
        "b": b.path,
        "same": not any(differences.values()),
        "tensors_compared": len(common),
        "bytes_compared": compared_bytes,
        **differences,
    }


def _difference(a: Side, b: Side, name: str, value_a: Any, value_b: Any) -> Difference:
    """The difference of two tensors; refuses a window whose comparison would take for ever."""
    stored = max(side.bytes_of(name) for side in (a, b))
    try:
        return difference(value_a, value_b, REPEATS_MAX * stored + ELEMENTS_MIN)
    except ValueError as error:
        raise penstock.errors.StateMismatchError(
            f"{a.path}: {name} cannot be compared: {error}, which neither side repeats as a whole; "
            "it stands for a part of another tensor, which is compared by itself",
            key=name,
            path=a.path,
        ) from error


def _groups(a: Side, b: Side, names: Sequence[str]) -> Iterator[list[str]]:
    """Names to read together: stored tensors up to a bound, each alias on its own."""
    group: list[str] = []
    group_bytes = 0
    for name in names:
        if name != a.targets[name] or name != b.targets[name]:
            yield [name]
            continue
        nbytes = a.bytes_of(name)
        if group and group_bytes + nbytes > GROUP_BYTES_MAX:
            yield group
            group, group_bytes = [], 0
        group.append(name)
        group_bytes += nbytes
    if group:
        yield group


def _positions(path: str, identities: Identities | None) -> dict[str, int]:
    """The position of each leaf in the order of the state."""
    checkpoint = OpenCheckpoint(path, unsealing=Unsealing.of(identities))
    try:
        with checkpoint.reading():
            checkpoint.view_as(0, allow_partial=True)
            leaves = tree.leaves(plain(checkpoint.root))
            return {name: index for index, (name, _) in enumerate(leaves)}
    finally:
        checkpoint.release()


def _leaves(state: Any) -> Iterator[Any]:
    """Yields the leaves of a partial state, in its order."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple | deque):
        for item in state:
            yield from _leaves(item)
    else:
        yield state


def _changed(name: str, a: Kind, b: Kind) -> dict[str, Any]:
    return {"name": name, "a": asdict(a), "b": asdict(b)}


def _ties(a: Side, b: Side) -> list[dict[str, Any]]:
    """Names that share their tensor with other names in one checkpoint than in the other."""
    common = a.targets.keys() & b.targets.keys()
    tied_a, tied_b = _tied(a, common), _tied(b, common)
    return [
        {"name": name, "a": tied_a[name], "b": tied_b[name]}
        for name in sorted(common)
        if tied_a[name] != tied_b[name]
    ]


def _tied(side: Side, names: set[str]) -> dict[str, list[str]]:
    """For each name, the other names with the same tensor.

    It depends on the order of the state which of tied names stores the tensor; that is no
    difference.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(side.targets[name], []).append(name)
    return {
        name: [other for other in groups[side.targets[name]] if other != name] for name in names
    }


def _values(a: Side, b: Side) -> list[dict[str, str]]:
    """Plain leaves of one name that differ in type or value, as Python literals."""
    return [
        {"name": name, "a": repr(value), "b": repr(b.values[name])}
        for name, value in a.values.items()
        if name in b.values and not _is_same(value, b.values[name])
    ]


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    # A literal equals itself for nan, and tells 0.0 from -0.0; but the order of a set is random.
    return bool(a == b) if isinstance(a, set | frozenset) else repr(a) == repr(b)
