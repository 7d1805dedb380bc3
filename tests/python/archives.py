"""Archives of `torch.save`, repacked in the ways of other programs."""

from __future__ import annotations

import zipfile

import torch


def members(path):
    """Returns the content of each member by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(path, content, compression=zipfile.ZIP_STORED, *, stream=False, large=False, names=()):
    """Writes an archive.

    Args:
        path: Path of the archive.
        content: Content of each member by name.
        compression: Compression method of each member.
        stream: Whether sizes and checksums follow the members (data descriptors).
        large: Whether sizes take 64 bits.
        names: Members that are written once more, empty.
    """
    with open(path, "wb") as file:
        target = Forward(file) if stream else file
        with zipfile.ZipFile(target, "w", compression) as archive:
            for name, data in content.items():
                entry = zipfile.ZipInfo(name)
                entry.compress_type = compression
                with archive.open(entry, "w", force_zip64=large) as member:
                    member.write(data)
            for name in names:
                archive.writestr(name, b"")
    return path


class Forward:
    """A file that can only be written forward."""

    def __init__(self, file):
        self._file = file

    def write(self, data):
        """Appends."""
        return self._file.write(data)

    def flush(self):
        """Writes buffered bytes."""
        self._file.flush()


def patched(path, *, flags=None, method=None):
    """Changes the flags, or the compression method, in each member's headers."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        starts = [entry.header_offset for entry in archive.infolist()]
        central = archive.start_dir
    places = [(at + 6, at + 8) for at in starts]
    at = central
    while data[at : at + 4] == b"PK\x01\x02":
        places.append((at + 8, at + 10))
        at += 46 + sum(int.from_bytes(data[at + n : at + n + 2], "little") for n in (28, 30, 32))
    for flag, kind in places:
        if flags is not None:
            data[flag] |= flags
        if method is not None:
            data[kind : kind + 2] = method.to_bytes(2, "little")
    path.write_bytes(data)
    return path


def saved(path, state, **arguments):
    """Writes a file by `torch.save`."""
    torch.save(state, path, **arguments)
    return path
