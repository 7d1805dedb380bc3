"""Whether two runs measured the same thing, and in which circumstances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.bench.results import Results

_DECISIVE = {
    "io": ("size_bytes", "verify"),
    "checkpoint": ("model", "ranks", "syncs", "fill", "fill_bytes"),
    "tune": ("size_bytes",),
}
"""Settings that a label does not tell and rates depend on."""

_MACHINE = ("processor", "cores_usable", "memory_bytes", "kernel")
_DISK = ("device", "file_system", "mount_options")


def differences(one: Results, other: Results) -> list[str]:
    """What makes the rates of two runs something else; nothing if they can be compared."""
    if one.kind != other.kind:
        return [f"kind: {one.kind} and {other.kind}"]
    found = list(_unequal(one.settings, other.settings, _DECISIVE.get(one.kind, ())))
    for label in one.cases.keys() & other.cases.keys():
        settings = one.cases[label], other.cases[label]
        names = sorted(settings[0].keys() | settings[1].keys())
        found += [f"{label}: {line}" for line in _unequal(*settings, names)]
    return found


def circumstances(one: Results, other: Results) -> list[str]:
    """What of the machine and the disk was not the same, which may be the difference in rates."""
    return [
        *_unequal(one.machine, other.machine, _MACHINE),
        *_unequal(one.disk, other.disk, _DISK),
    ]


def _unequal(
    one: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, ...] | list[str]
) -> Iterator[str]:
    for name in names:
        if one.get(name) != other.get(name):
            yield f"{name}: {one.get(name)} and {other.get(name)}"
