"""A tag on storage: a checkpoint, a stub for each file that DeepSpeed looks for, and ``latest``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import penstock
from penstock.errors import IncompleteCheckpointError, StorageError, UnsupportedStateError
from penstock.integrations import raw
from penstock.integrations.deepspeed import values
from penstock.loading.foreign import is_checkpoint

if TYPE_CHECKING:
    from penstock.options import Options

_STUB = b"penstock-stub\n"
_SAYS = (
    b"What belongs here is in the checkpoint that manifest.json and its files are.\n"
    b"penstock.integrations.deepspeed.checkpoint_engine.to_torch writes it for torch.load.\n"
)


def is_stub(path: str) -> bool:
    """Whether a file only stands for one that is in the checkpoint beside it."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_STUB)) == _STUB
    except OSError:
        return False


def put_stub(path: str) -> None:
    """Makes a stub, durably, if there is none."""
    if not is_stub(path):
        write(path, _STUB + _SAYS)


def stubs(path: str) -> list[str]:
    """The names of the files that a tag's directory has stubs of."""
    return sorted(name for name in os.listdir(path) if is_stub(os.path.join(path, name)))


def write(path: str, content: bytes) -> None:
    """Writes a small file so that after a crash it is the old one or this one.

    Raises:
        StorageError: The operating system failed it.
    """
    above = os.path.dirname(path)
    beside = f"{path}.{os.getpid()}.tmp"
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        descriptor = os.open(above, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}; free or mount what it lies on"
        raise StorageError(message, path=path, errno=error.errno) from error


def read_file(
    path: str, *, trust: bool = False, options: Options | None = None, device: Any = None
) -> Any:
    """The state that a stub stands for.

    Args:
        path: The stub.
        trust: Whether bytes of pickle in it are unpickled.
        options: How bytes move.
        device: Where tensors go.

    Raises:
        IncompleteCheckpointError: The save of the tag never finished.
        UnsupportedStateError: There are bytes of pickle, and ``trust`` is False.
        PenstockError: It cannot be read.
    """
    directory, name = os.path.split(path)
    if not is_checkpoint(directory):
        raise IncompleteCheckpointError(
            f"{directory}: this tag was never saved to its end: load another one, such as the one "
            f"that {os.path.join(os.path.dirname(directory), 'latest')} names",
            path=directory,
        )
    names = penstock.inspect(directory).metadata.get("pickled")
    if names and not trust:
        # Before anything of it is loaded.
        raise UnsupportedStateError(
            f"{directory}: {', '.join(names)} are stored as pickle, which can run any code: give "
            "trust=True if you trust whoever wrote them",
            key=names[0],
        )
    state = penstock.load(directory, keys=f"files.{name}.*", options=options, device=device)
    found = raw.unpacked(state["files"][name], name, trust=trust, remedy="give trust=True")
    return values.built(found, directory)
