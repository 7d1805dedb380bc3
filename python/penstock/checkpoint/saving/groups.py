"""`Groups`: tensors of a state stored in separate shards for readers of models.

Such a reader opens the files that an index lists, takes every tensor in them for one of the
model's, and identifies it by the model's name for it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from penstock import _native
from penstock.checkpoint.saving.wrappers import final_names
from penstock.checkpoint.state.tree.names import containers, plain_text, unescaped
from penstock.common.found import is_directory
from penstock.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


IN_PLACE = ""
"""The group whose index is in the checkpoint's directory."""

Files: TypeAlias = "Mapping[str, bytes | str | os.PathLike[str]] | str | os.PathLike[str]"
"""Small files by name, as bytes or as a path to read; or a directory, without its weights."""

_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}")
_WEIGHTS = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
    ".index.json",
)
_FILE_BYTES_MAX = 64 << 20
_OF_ATTEMPT = re.compile(r"\.[0-9a-f]{32}\.")
"""A part that only names of a checkpoint's files contain."""
_STEP = re.compile(r"(step|damaged)-[0-9-]+")
_NAMES_OF_OURS = frozenset((_native.MANIFEST, "protected"))


class Member(NamedTuple):
    """The place of a tensor in a group."""

    group: str
    name: str


@dataclass(frozen=True, slots=True)
class Groups:
    """The assignment of tensors to groups.

    Attributes:
        group_of: The group of all tensors below a name. The name is as `penstock.inspect` shows it,
            or consists of the raw keys joined by dots.
    """

    group_of: Mapping[str, str]

    @classmethod
    def check(cls, groups: Mapping[str, str] | None) -> Groups:
        """Checks a caller's groups."""
        if groups is None:
            return cls({})
        if not hasattr(groups, "items"):
            raise TypeError(f"groups={groups!r}: must be a dict of dotted names to names of groups")
        found: dict[Any, Any] = dict(groups.items())
        for prefix, group in found.items():
            if not isinstance(prefix, str) or not isinstance(group, str):
                raise TypeError(f"groups: {prefix!r}: {group!r} must both be text")
            if group and not _NAME.fullmatch(group):
                raise ValueError(
                    f"groups: {group!r} must be '' or a name of letters, digits, '.', '_' and '-'"
                )
            for other in found:
                if other != prefix and _is_below(other, prefix):
                    raise ValueError(f"groups: {other!r} is a part of {prefix!r}: name only one")
        if len(set(found.values())) < len(found):
            raise ValueError(f"groups={found!r}: two groups have one name: each needs its own")
        return cls(found)

    def among(self, names: Iterable[str]) -> Groups:
        """Returns the same groups by escaped names of the state.

        Args:
            names: The names of all tensors of the state. If no tensor is below a group's name, the
                name is taken for raw keys.
        """
        listed = list(names)
        found: dict[str, str] = {}
        for prefix, group in self.group_of.items():
            if not any(_is_below(name, prefix) for name in listed):
                written = (above for name in listed for above in containers(name))
                found |= dict.fromkeys(
                    (above for above in written if plain_text(unescaped(above)) == prefix), group
                )
            found.setdefault(prefix, group)
        return Groups(found)

    def group(self, name: str) -> str | None:
        """Returns the group of a tensor; None if it belongs to none."""
        prefix = self._prefix(name)
        return None if prefix is None else self.group_of[prefix]

    def inner(self, name: str) -> str | None:
        """Returns a tensor's name within its group; None if it belongs to none."""
        prefix = self._prefix(name)
        return None if prefix is None else _below(name, prefix)

    def members(self, names: Iterable[str]) -> dict[str, Member]:
        """Returns the group of each tensor and its name there.

        Args:
            names: The names of all tensors of the state; those outside of groups are omitted.
        """
        below: dict[str, dict[str, str]] = {prefix: {} for prefix in self.group_of}
        for name in names:
            prefix = self._prefix(name)
            if prefix is not None:
                below[prefix][name] = _below(name, prefix)
        found: dict[str, Member] = {}
        for prefix, group in self.group_of.items():
            final_of = final_names(below[prefix].values())
            for name, inner in below[prefix].items():
                found[name] = Member(group, final_of[inner])
        return found

    def _prefix(self, name: str) -> str | None:
        """Returns the name of the group that contains a tensor."""
        for prefix in self.group_of:
            if name != prefix and _is_below(name, prefix):
                return prefix
        return None


NO_GROUPS = Groups({})
"""All tensors are stored together."""


def read_files(files: Files | None) -> list[tuple[str, bytes]]:
    """Reads the small files of a checkpoint."""
    if files is None:
        return []
    found: dict[str, Any]
    if isinstance(files, str | os.PathLike):
        found = {}
        for entry in os.scandir(files):
            if _NAME.fullmatch(entry.name) and entry.is_file() and not _is_left_out(entry.name):
                found[entry.name] = entry.path
    elif hasattr(files, "items"):
        found = dict(files.items())
    else:
        raise TypeError(f"files={files!r}: must be a dict of names, or a directory")
    return [(name, _read(name, content)) for name, content in found.items()]


def _read(name: Any, content: Any) -> bytes:
    is_name = isinstance(name, str) and _NAME.fullmatch(name) and not _is_ours(name)
    if not is_name or name.endswith(".safetensors"):
        raise ValueError(
            f"files: {name!r} cannot lie beside the shards: a name has letters, digits, '.', '_' "
            "and '-', is none of Penstock's own, and is not that of weights"
        )
    if isinstance(content, bytes | bytearray | memoryview):
        text = bytes(content)
    elif isinstance(content, str | os.PathLike):
        # Opening a pipe would block the save.
        fd = os.open(content, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ValueError(f"files: {name}: {os.fspath(content)!r} is no regular file")
            text = file.read(_FILE_BYTES_MAX + 1)
    else:
        raise TypeError(f"files: {name}: must be bytes or a path, not {type(content).__name__}")
    if len(text) > _FILE_BYTES_MAX:
        raise ValueError(
            f"files: {name} has more than {_FILE_BYTES_MAX >> 20} MiB: save it in the state"
        )
    return text


def _is_left_out(name: str) -> bool:
    return name.endswith(_WEIGHTS) or _is_ours(name)


INDEX = "model.safetensors.index.json"


def check_no_index(groups: Groups, files: Sequence[tuple[str, bytes]]) -> None:
    """Refuses an index of the caller if Penstock writes one."""
    if IN_PLACE in groups.group_of.values() and any(name == INDEX for name, _ in files):
        raise ValueError(f"files: {INDEX} is written for the group '': leave it out")


def check_copies(path: str, groups: Groups, files: Sequence[tuple[str, bytes]]) -> None:
    """Refuses, before anything is written, small files whose names are taken by directories."""
    names = [name for name, _ in files]
    if IN_PLACE in groups.group_of.values():
        names.append(INDEX)
    for name in names:
        copy = os.path.join(path, name)
        if is_directory(copy) and not os.path.islink(copy):
            raise StorageError(
                f"{copy} is a directory, and a small file of the checkpoint is to lie there: move "
                "it away; nothing was written",
                path=copy,
                errno=errno.EISDIR,
            )


def _is_ours(name: str) -> bool:
    of_ours = name in _NAMES_OF_OURS or _OF_ATTEMPT.search(name) is not None
    return of_ours or _STEP.fullmatch(name) is not None


def _below(name: str, prefix: str) -> str:
    return name[len(prefix) + 1 :] if prefix else name


def _is_below(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")
