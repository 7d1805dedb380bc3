"""A tag on storage: a checkpoint, a stub for each of DeepSpeed's files, and ``latest``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import penstock
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PenstockError,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)
from penstock.integrations import pickling
from penstock.integrations.deepspeed import values
from penstock.plugin import SealingKeys, durable, is_checkpoint

if TYPE_CHECKING:
    from penstock.options import Options

NO_KEYS = SealingKeys()
"""No keys but those that the environment names."""

_STUB = b"penstock-stub\n"
_SAYS = (
    b"What belongs here is in the checkpoint that manifest.json and its files are.\n"
    b"penstock.integrations.deepspeed.checkpoint_engine.to_torch writes it for torch.load.\n"
)
SHARED = "penstock.shared"
"""A tensor in each file: of other ranks' files, a load returns only those that have a tensor."""


def is_stub(path: str) -> bool:
    """Whether a file is a stub for one in the checkpoint beside it."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_STUB)) == _STUB
    except OSError:
        return False


def put_stub(path: str) -> None:
    """Writes a stub, durably, if there is none."""
    if not is_stub(path):
        write(path, _STUB + _SAYS)


def stubs(path: str) -> list[str]:
    """Names of the stubs in a tag's directory."""
    return sorted(name for name in os.listdir(path) if is_stub(os.path.join(path, name)))


def write(path: str, content: bytes) -> None:
    """Writes a small file atomically: after a crash it is the old one or the new one."""
    try:
        durable.replace(path, content)
    except OSError as error:
        raise _unwritten(path, error) from error


def check_ours(path: str) -> None:
    """Raises `CheckpointExistsError` for a tag that DeepSpeed saved itself, on every rank alike."""
    if os.path.isdir(path) and not is_checkpoint(path):
        for name in _names(path):
            check_stub(os.path.join(path, name))


def check_stub(path: str) -> None:
    """Raises `CheckpointExistsError` if a file is DeepSpeed's own."""
    if os.path.exists(path) and not is_stub(path):
        raise CheckpointExistsError(
            f"{path} was saved by DeepSpeed itself: save under another tag, or delete it", path=path
        )


def _names(path: str) -> list[str]:
    """Files of a tag's directory that are named as DeepSpeed names them."""
    return sorted(name for name in os.listdir(path) if name.endswith("_states.pt"))


def make(path: str) -> None:
    """Makes a directory, if there is none."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: str, error: OSError) -> StorageError:
    message = f"{path} cannot be written: {error.strerror}; make room there, or save elsewhere"
    return StorageError(message, path=path, errno=error.errno)


def complete(root: str) -> list[str]:
    """Complete tags by Penstock in a directory."""
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    return [name for name in names if is_checkpoint(os.path.join(root, name))]


def unfit(path: str) -> PenstockError:
    """The error for a tag without a file that the engine looks for."""
    root, tag = os.path.split(path)
    if not os.path.isdir(path):
        found = ", ".join(complete(root)) or "none"
        return CheckpointNotFoundError(
            f"{path}: there is no such tag; complete ones beside it: {found}", path=path
        )
    found = ", ".join(_names(path)) or "no file of a tag"
    return StateMismatchError(
        f"{path} holds {found}, and nothing of a name that this engine looks for: build it with "
        f"the stage of ZeRO and the parallelism that saved {tag}",
        path=path,
    )


def read_file(
    path: str,
    *,
    trust: bool = False,
    options: Options | None = None,
    device: Any = None,
    keys: SealingKeys = NO_KEYS,
) -> Any:
    """Loads the state that a stub stands for."""
    directory, name = os.path.split(path)
    if not is_checkpoint(directory):
        others = ", ".join(complete(os.path.dirname(directory))) or "none"
        raise IncompleteCheckpointError(
            f"{directory}: this tag was never saved to its end: load another one; complete ones "
            f"beside it: {others}",
            path=directory,
        )
    names = penstock.inspect(directory, identities=keys.identities).metadata.get("pickled")
    if names and not trust:
        # Before anything is loaded.
        raise UnsupportedStateError(
            f"{directory}: {', '.join(names)} are stored as pickle, which can run any code: give "
            "trust=True if you trust whoever wrote them",
            key=names[0],
        )
    # Without a dot, as an empty entry, such as a layer without weights, is a leaf itself.
    pattern = f"files.{name}*"
    try:
        state = penstock.load(
            directory, keys=pattern, options=options, device=device, **keys.opening
        )
    except StateMismatchError as error:
        if error.key != pattern:
            raise
        raise CheckpointNotFoundError(
            f"{path}: the tag was saved anew by other ranks, and this file is none of it: delete "
            "it, or load with as many ranks as saved the tag",
            path=path,
        ) from error
    stored = state["files"][name]
    # Files saved by earlier versions have none.
    stored.pop(SHARED, None)
    found = pickling.unpacked(stored, name, trust=trust, remedy="give trust=True")
    return values.built(found, directory)
