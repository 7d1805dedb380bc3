"""Identifies paths that hold no Penstock checkpoint, or a sealed one: other files, and stores.

Users who migrate pass paths of other libraries' checkpoints. The error names the format and the
command that converts it.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock import _native
from penstock.checkpoint.loading.dcp_files import METADATA, is_marked
from penstock.common.file_names import rank_of, step_of
from penstock.common.found import is_there, of_git_lfs
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    PenstockError,
    SealedError,
    StorageError,
)
from penstock.io.files.safetensors_files import SNIFFED_BYTES, begins_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.sealing import Identities, Key

_OURS = b'{"format":"penstock-checkpoint"'
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".tar")
_STARTS = (b"PK\x03\x04", b"\x80", b"L119547037146038801333356L\n")
"""The first bytes of ``torch.save`` files: a zip archive, or a pickle of a number (as text before
protocol 2).
"""
_RANDOM = re.compile(r"random_states_\d+\.pkl")
"""The file that accelerate writes last."""


@contextmanager
def describing_contents(path: str) -> Iterator[None]:
    """Extends errors about a path without a checkpoint by a description of its contents."""
    try:
        yield
    except (CheckpointNotFoundError, StorageError) as error:
        if isinstance(error, StorageError) and error.errno != errno.ENOTDIR:
            raise
        told = describe(path)
        if told is None:
            raise
        raise CheckpointNotFoundError(f"{path} {told}", path=path) from error


def describe(path: str) -> str | None:
    """Describes the contents of a path and the remedy; None if they are unknown."""
    try:
        found = _native.stat(path)
        if found is not None and found[0] == "file":
            return _file(path)
        return _directory(path, set(_native.list_names(path)))
    except OSError:
        return None


def is_checkpoint(path: str) -> bool:
    """Whether a directory has a Penstock manifest; other tools use the same file name."""
    try:
        return _native.read_start(os.path.join(path, _native.MANIFEST), len(_OURS)) == _OURS
    except OSError:
        return False


def begins_torch_save(start: bytes) -> bool:
    """Whether a file's first bytes, at least 32, are those of a ``torch.save`` file."""
    return start.startswith(_STARTS)


def steps_in(path: str) -> list[str]:
    """Returns the names of a store's complete steps in a directory; empty if there are none."""
    try:
        found = sorted(filter(_is_step, _native.list_names(path)))
    except OSError:
        return []
    return [name for name in found if is_checkpoint(os.path.join(path, name))]


def check_no_store(path: str) -> None:
    """Refuses to save a checkpoint into a store or table, which could then not be opened."""
    # A single listing, because each look is a request in a bucket.
    try:
        names = _native.list_names(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return
        # The directory may be accessible but not listable.
        head = os.path.join(path, _native.TABLE_MANIFEST)
        names = [_native.TABLE_MANIFEST] if is_there(head) else []
    if _native.TABLE_MANIFEST in names:
        raise CheckpointExistsError(
            f"{path} is a table (penstock.features.Table): save to a directory of its own",
            path=path,
        )
    if any(map(_is_step, names)) and not is_checkpoint(path) and steps_in(path):
        raise CheckpointExistsError(
            f"{path} is a store of checkpoints, which could not be opened any more: "
            f"CheckpointStore({path!r}).save(step, state) saves a step of it; or save to a new "
            "directory",
            path=path,
        )


def not_a_store(root: str) -> CheckpointNotFoundError:
    """Returns the error for a checkpoint that is opened as a store."""
    above, name = os.path.split(root)
    steps = steps_in(root)
    if steps:
        newest = os.path.join(root, steps[-1])
        return CheckpointNotFoundError(
            f"{root} is a store of {len(steps)} steps that a checkpoint was saved onto: "
            f"penstock.load({root!r}) loads that one, and penstock.load({newest!r}) the newest "
            "step; move what the checkpoint consists of (manifest.json, part-* and shard-*) to a "
            "directory of its own, and the store can be opened",
            path=root,
        )
    remedy = f"penstock.load({root!r}) loads it"
    step = step_of(name)
    if step is not None:
        remedy += f", and CheckpointStore({above!r}).load(step={step}) as a step of its store"
    return CheckpointNotFoundError(
        f"{root} is a checkpoint, not a store of them: {remedy}; a store is the directory above "
        "its steps",
        path=root,
    )


def _is_step(name: str) -> bool:
    return step_of(name) is not None


def _is_ours(name: str) -> bool:
    return name == _native.MANIFEST or rank_of(name) is not None


def _file(path: str) -> str:
    above, name = os.path.split(path)
    if _is_ours(name) and is_checkpoint(above or "."):
        return f"is a file of a checkpoint: pass the directory that it is in, {above or '.'!r}"
    start = _native.read_start(path, SNIFFED_BYTES)
    if of_git_lfs(start):
        return (
            "is a pointer of Git LFS, and the file that it stands for was not fetched: run"
            " `git lfs pull` in its repository"
        )
    if name.endswith(".safetensors") or begins_header(start):
        return f"is a file of safetensors, not a checkpoint: {importing(above or '.')}"
    if begins_torch_save(start):
        return f"is a file as torch.save writes them, not a checkpoint: {_converting(path)}"
    if name.endswith(_PICKLES):
        return (
            "is called like files of torch.save and does not begin like one: it is cut or damaged, "
            "or of another program"
        )
    return "is a file, and a checkpoint is a directory: pass the directory that penstock.save made"


def _directory(path: str, names: set[str]) -> str | None:
    if _native.MANIFEST in names or any(map(_is_step, names)):
        # A Penstock checkpoint or a store of them, whose own error says more.
        return None
    if _native.TABLE_MANIFEST in names:
        return as_table(path)
    if METADATA in names and is_marked(path):
        return (
            "held a Penstock checkpoint, of which only the note for tools of DCP is left "
            f"({METADATA}): take another one, and remove this directory"
        )
    if METADATA in names:
        what = "is a checkpoint of PyTorch's Distributed Checkpoint (DCP)"
        return f"{what}: {_converting(path)}"
    if any(map(_RANDOM.fullmatch, names)):
        return f"is a directory of Accelerator.save_state: {_converting(path)}"
    has_ranks = any(name.startswith(("zero_pp_rank_", "mp_rank_")) for name in names)
    has_steps = "latest" in names and any(name.startswith("global_step") for name in names)
    if has_ranks or has_steps:
        return f"is a checkpoint of DeepSpeed: {_converting(path)}"
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        what = "is a model as Hugging Face's save_pretrained writes them"
        if any(name.endswith(".safetensors") for name in names):
            return f"{what}: {importing(path)}"
        return (
            f"{what}: read it with AutoModel.from_pretrained({path!r}), then "
            "penstock.save(directory, model.state_dict())"
        )
    foreign = sorted(
        name for name in names if name.endswith((".safetensors", *_PICKLES)) and not _is_ours(name)
    )
    if foreign:
        file = os.path.join(path, foreign[0])
        return f"holds no checkpoint but files of others, and {file} {_file(file)}"
    return None


def _converting(path: str) -> str:
    return f"`penstock convert {shlex.quote(path)} NEW` makes a checkpoint NEW of it"


def as_table(path: str) -> str:
    """Describes a directory that is a mutable table."""
    return (
        f"is a table whose rows change: penstock.features.Table({path!r}) opens it, and its"
        " snapshot(…) makes a checkpoint"
    )


def importing(directory: str) -> str:
    """Describes how to make a checkpoint from a directory of safetensors files."""
    return (
        f"`penstock import {shlex.quote(directory)} NEW` makes a checkpoint NEW around the files "
        "there, by links"
    )


def is_sealed(path: str) -> bool:
    """Whether a checkpoint says that it is sealed; False if its description cannot be read."""
    try:
        return _recipients(path) is not None
    except PenstockError:
        return False


def _recipients(path: str) -> list[str] | None:
    with describing_contents(path):
        opened = _native.open(path, sealed_ok=True)
    opened.release()
    return opened.recipients


def check_unsealing(
    path: str,
    *,
    unseal: bool,
    identities: Identities | Key | Iterable[Key] | None,
    unseal_by: str,
) -> None:
    """Refuses a sealed checkpoint that nobody has asked to write in the clear.

    Identities of the environment do not ask for it, so they must be given as well.

    Args:
        path: The checkpoint's directory.
        unseal: Whether the caller asks for it.
        identities: The caller's identities.
        unseal_by: How the caller asks for it, for the error: ``"unseal=True"``.

    Raises:
        SealedError: The checkpoint is sealed, and ``unseal`` is False or there are no identities.
        PenstockError: It cannot be opened.
    """
    if (unseal and identities is not None) or _recipients(path) is None:
        return
    keys = "--identity FILE" if unseal_by.startswith("--") else "identities="
    raise SealedError(
        f"{path} is sealed, and this would write its contents in the clear: if that is wanted, "
        f"give {unseal_by} and {keys}",
        path=path,
    )
