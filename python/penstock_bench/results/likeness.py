"""Whether two runs measured the same thing, and in which circumstances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from penstock_bench.results.results import Results

_DECISIVE = {
    "io": ("size_bytes", "verify"),
    "checkpoint": ("model", "ranks", "syncs", "fill", "fill_bytes"),
    "gather": ("law", "recurring", "limit_bytes"),
}
"""Settings that a label does not tell and rates depend on."""

_MACHINE = ("processor", "cores_usable", "memory_bytes", "kernel", "environment")
_DISK = ("device", "file_system", "mount_options")


def differences(one: Results, other: Results) -> list[str]:
    """What makes the rates of two runs something else; nothing if they can be compared.

    A setting that only one of them knows is one of another release, which had no such choice.
    """
    if one.kind != other.kind:
        return [f"kind: {one.kind} and {other.kind}"]
    found = list(_unequal(one.settings, other.settings, _DECISIVE.get(one.kind, ())))
    for label in one.cases:
        if label in other.cases:
            settings = one.cases[label], other.cases[label]
            common = [name for name in settings[0] if name in settings[1]]
            found += _unequal(*settings, common, f"{label}: ")
    return found


def circumstances(one: Results, other: Results) -> list[str]:
    """What of machine, disk and path was not the same, which may be the difference in rates."""
    paths = _is_direct(one), _is_direct(other)
    common = [pair for pair in paths[0] if pair in paths[1]]
    return [
        *_unequal(one.machine, other.machine, _MACHINE),
        *_unequal(one.disk, other.disk, _DISK),
        *(
            f"{case}, {by}: {_path(paths[0][case, by])} and {_path(paths[1][case, by])}"
            for case, by in common
            if paths[0][case, by] != paths[1][case, by]
        ),
    ]


def _is_direct(results: Results) -> dict[tuple[str, str], bool]:
    """Of each case, whether all of its measurements passed the page cache by."""
    found: dict[tuple[str, str], bool] = {}
    for one in results.measurements:
        if not one.error:
            pair = one.case, one.by
            found[pair] = found.get(pair, True) and one.is_direct
    return found


def _path(is_direct: bool) -> str:
    return "past the page cache" if is_direct else "through the page cache"


def _unequal(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str], place: str = ""
) -> Iterator[str]:
    for name in names:
        first, second = one.get(name), other.get(name)
        if isinstance(first, dict) and isinstance(second, dict):
            every = dict.fromkeys((*first, *second))
            yield from _unequal(first, second, every, f"{place}{name}.")
        elif first != second:
            yield f"{place}{name}: {first} and {second}"
