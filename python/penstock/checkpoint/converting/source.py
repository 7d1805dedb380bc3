"""Detects the kind of checkpoint at a path."""

from __future__ import annotations

import os
import stat

from penstock.checkpoint.converting import accelerate, deepspeed
from penstock.checkpoint.converting.distributed.megatron import is_megatron
from penstock.checkpoint.converting.kinds import KINDS, Kind
from penstock.checkpoint.loading.dcp_files import METADATA, data_files, is_marked, metadata_of_ranks
from penstock.checkpoint.loading.path_kind import (
    begins_torch_save,
    describe,
    importing,
    is_checkpoint,
    steps_in,
)
from penstock.common.found import of_git_lfs, unfetched
from penstock.errors import CheckpointExistsError, CheckpointNotFoundError
from penstock.io.files.safetensors_files import SNIFFED_BYTES, begins_header

EXTRA = "meta.pt"
"""The file that Lightning writes beside DCP's files if a strategy saves in shards."""


def kind_of(path: str) -> Kind:
    """Returns the kind of checkpoint at a path; a Lightning file counts as ``torch.save``'s."""
    mode = os.stat(path).st_mode
    kind: Kind | None = None
    if stat.S_ISDIR(mode):
        kind = _of_directory(path, set(os.listdir(path)))
    elif stat.S_ISREG(mode):
        # Opening a pipe would block.
        kind = _of_file(path)
    if kind is None:
        told = describe(path) or "holds nothing that penstock convert reads"
        raise CheckpointNotFoundError(
            f"{path} {told} (it converts {', '.join(KINDS)}; --from says which it is)", path=path
        )
    return kind


def _of_file(path: str) -> Kind | None:
    with open(path, "rb") as file:
        start = file.read(SNIFFED_BYTES)
    if of_git_lfs(start):
        raise unfetched(path)
    if path.endswith(".safetensors") or begins_header(start):
        raise _of_safetensors(path)
    return "torch" if begins_torch_save(start) else None


def _of_directory(path: str, names: set[str]) -> Kind | None:
    if is_checkpoint(path) or steps_in(path):
        raise CheckpointExistsError(
            f"{path} is Penstock's already: penstock.load reads it as it is", path=path
        )
    if is_marked(path):
        return None
    if METADATA in names or data_files(names) or metadata_of_ranks(names):
        if EXTRA in names:
            return "lightning"
        return "megatron" if is_megatron(path) else "dcp"
    # accelerate may let DeepSpeed save in the same directory.
    if accelerate.is_accelerate(names):
        return "accelerate"
    is_above = deepspeed.LATEST in names or deepspeed.LATEST_UNIVERSAL in names
    if is_above or deepspeed.is_tag(names):
        return "deepspeed"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        raise _of_safetensors(path)
    return None


def _of_safetensors(path: str) -> CheckpointNotFoundError:
    directory = path if os.path.isdir(path) else os.path.dirname(path) or "."
    return CheckpointNotFoundError(
        f"{path} is of safetensors, which need not be converted: {importing(directory)}",
        path=path,
    )
