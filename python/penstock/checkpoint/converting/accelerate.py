"""Reads directories of `Accelerator.save_state` as one state with a member per file."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.converting.deepspeed import read_deepspeed
from penstock.checkpoint.converting.files.safetensors_file import read_safetensors
from penstock.errors import CorruptCheckpointError, IncompleteCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.checkpoint.converting.files.pickles import Pickles

_RANDOM = re.compile(r"random_states_(\d+)\.pkl")
_PICKLED = re.compile(
    r"(?:random_states_\d+|custom_checkpoint_\d+)\.pkl|scaler\.pt"
    r"|(?:pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(?:_\w+)?\.bin"
)
_SAFE = re.compile(r"model(?:_\d+)?\.safetensors")
_INDEX = re.compile(r"(model|pytorch_model)(?:_\d+)?\.(?:safetensors|bin)\.index\.json")
_SHARDED = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")
_ENGINE = re.compile(r"pytorch_model(?:_\d+)?")
_OF_IT = re.compile(r"random_states_\d+\.pkl|(?:optimizer|scheduler|sampler)(?:_\d+)?\.bin")


def is_accelerate(names: Iterable[str]) -> bool:
    """Whether a directory has files that only `save_state` writes, perhaps not all of them."""
    return any(map(_OF_IT.fullmatch, names))


def read_accelerate(path: str, pickles: Pickles) -> dict[str, Any]:
    """Returns the state of each file under its name without suffix.

    Weights in several files are one member, under the name of their index.

    Directories, such as those of DeepSpeed and FSDP, are members under their names.
    """
    names = sorted(os.listdir(path))
    _check_ranks(path, names)
    state: dict[str, Any] = {}
    for name in names:
        file = os.path.join(path, name)
        if _PICKLED.fullmatch(name):
            state[name.partition(".")[0]] = pickles.read(file)
        elif _SAFE.fullmatch(name):
            state[name.partition(".")[0]] = read_safetensors(file)
        elif _INDEX.fullmatch(name):
            state[name.partition(".")[0]] = _indexed(path, name, pickles)
        elif _SHARDED.fullmatch(name) and os.path.isdir(file):
            # Imported late, as it takes seconds.
            from penstock.checkpoint.converting.distributed.dcp import read_dcp

            state[name] = read_dcp(file, pickles)
        elif _ENGINE.fullmatch(name) and os.path.isdir(file):
            state[name] = read_deepspeed(file, pickles)
    if not any(re.match(r"(?:pytorch_)?model", name) for name in state):
        raise IncompleteCheckpointError(
            f"{path}: the file of the model (model.safetensors, pytorch_model.bin) is missing: "
            "copy the directory again",
            path=path,
        )
    return state


def _check_ranks(path: str, names: list[str]) -> None:
    """Refuses missing ranks, and files of no rank at all: the number of ranks is not recorded."""
    ranks = {int(found[1]) for name in names if (found := _RANDOM.fullmatch(name))}
    missing = set(range(max(ranks, default=0) + 1)) - ranks
    if missing:
        raise IncompleteCheckpointError(
            f"{path}: random_states_{min(missing)}.pkl is missing, which accelerate writes last: "
            "copy what all ranks have written, which is on their own disks unless they share one, "
            "or take another checkpoint",
            path=path,
        )


def _indexed(path: str, name: str, pickles: Pickles) -> dict[str, Any]:
    file = os.path.join(path, name)
    try:
        with open(file, encoding="utf-8") as opened:
            shards = sorted({*map(os.path.basename, json.load(opened)["weight_map"].values())})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{file} is no index: {error}", path=file) from error
    state: dict[str, Any] = {}
    for shard in shards:
        where = os.path.join(path, shard)
        if not os.path.exists(where):
            raise IncompleteCheckpointError(
                f"{path}: {shard} is missing, which {name} lists: copy the directory again",
                path=path,
            )
        is_safe = shard.endswith(".safetensors")
        state |= read_safetensors(where) if is_safe else pickles.read(where)
    return state
