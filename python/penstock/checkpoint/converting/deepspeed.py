"""Reads DeepSpeed directories: all files of a tag, or a universal checkpoint, as one state."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.path_kind import is_checkpoint
from penstock.common.found import check_fetched
from penstock.errors import CheckpointExistsError, IncompleteCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.checkpoint.converting.files.pickles import Pickles

LATEST = "latest"
"""The file that names the directory of the newest tag."""

LATEST_UNIVERSAL = "latest_universal"
"""The file that names the newest universal checkpoint, which DeepSpeed made from a tag."""

_ZERO = "zero"
"""The directory of a universal checkpoint that has one directory for each parameter."""

_COMMON = "optimizer_state.pt"
"""The rest of the optimizer's state, written after all of those directories."""

_MASTER = "fp32.pt"

_FILE = re.compile(r".+_(?:model|optim)_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"((?:bf16_)?)zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def is_tag(names: Iterable[str]) -> bool:
    """Whether these are the files of a tag."""
    return any(map(_FILE.fullmatch, names))


def read_deepspeed(path: str, pickles: Pickles) -> dict[str, Any]:
    """Returns the state of each file under its name without ``.pt``, also in subdirectories.

    Args:
        path: The directory of a tag or a universal checkpoint, or its parent, whose `LATEST` file
            selects one; without it, `LATEST_UNIVERSAL` does.
        pickles: Reads the files.
    """
    directory = _tag(path)
    names = os.listdir(directory)
    if is_checkpoint(directory):
        raise CheckpointExistsError(
            f"{directory} is Penstock's already: penstock.load reads it as it is", path=directory
        )
    files = sorted(name for name in names if name.endswith(".pt"))
    read = {name: pickles.read(os.path.join(directory, name)) for name in files}
    state = {name.removesuffix(".pt"): one for name, one in read.items()}
    if _ZERO in names:
        return {**state, _ZERO: _universal(os.path.join(directory, _ZERO), pickles)}
    _check_ranks(directory, read)
    return state


def _universal(directory: str, pickles: Pickles) -> dict[str, Any]:
    """Returns the state of each parameter in a universal checkpoint, by parameter and file."""
    if not os.path.isfile(os.path.join(directory, _COMMON)):
        raise IncompleteCheckpointError(
            f"{directory}: {_COMMON}, which DeepSpeed writes last, is missing: run ds_to_universal "
            "again, or give the directory of the tag",
            path=directory,
        )
    found: dict[str, Any] = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if name.endswith(".pt"):
            found[name.removesuffix(".pt")] = pickles.read(path)
            continue
        files = sorted(one for one in os.listdir(path) if one.endswith(".pt"))
        if _MASTER not in files:
            raise IncompleteCheckpointError(
                f"{directory}: {name}/{_MASTER} is missing: copy the directory again, or run "
                "ds_to_universal again",
                path=directory,
            )
        found[name] = {
            one.removesuffix(".pt"): pickles.read(os.path.join(path, one)) for one in files
        }
    return found


def step_of(state: dict[str, Any]) -> Any:
    """Returns the step of the save; None if unknown."""
    models = (one for one in state.values() if isinstance(one, dict) and "global_steps" in one)
    return next((one["global_steps"] for one in models), None)


def _tag(path: str) -> str:
    if is_tag(os.listdir(path)):
        return path
    found = [
        name for name in (LATEST, LATEST_UNIVERSAL) if os.path.isfile(os.path.join(path, name))
    ]
    if not found:
        raise IncompleteCheckpointError(
            f"{path}: {LATEST}, which names the newest tag, is missing: give a directory of a tag",
            path=path,
        )
    check_fetched(os.path.join(path, found[0]))
    with open(os.path.join(path, found[0]), encoding="utf-8", errors="replace") as file:
        tag = file.read().strip()
    directory = os.path.join(path, os.path.basename(tag))
    if not os.path.isdir(directory) or not is_tag(os.listdir(directory)):
        raise IncompleteCheckpointError(
            f"{path}: {tag}, the tag that {found[0]} names, is missing or empty: give the "
            "directory of another tag",
            path=path,
        )
    return directory


def _check_ranks(directory: str, read: dict[str, Any]) -> None:
    """Checks that files of all ranks are present, given the rank counts in the model files."""
    models = {name: found for name in read if (found := _MODEL.fullmatch(name))}
    states = [read[name] for name in models if isinstance(read[name], dict)]
    if not states:
        raise IncompleteCheckpointError(
            f"{directory}: all files of model states are missing: copy the directory again",
            path=directory,
        )
    optimizers = [found for name in read if (found := _OPTIMIZER.fullmatch(name))]
    dp_ranks, mp_ranks = (_of(states, key) for key in ("dp_world_size", "mp_world_size"))
    if any(name.startswith("layer_") for name in read):
        # With a pipeline, the model files show all ranks; weights are in files by layer.
        mp_ranks = 1 + max(int(found[2]) for found in models.values())
    of_model = ["mp_rank_{mp:02}_model_states.pt"]
    if any(found[1] for found in models.values()):
        of_model = ["zero_pp_rank_{dp}_mp_rank_{mp:02}_model_states.pt"]
    has_parts = any(state.get("param_shapes") is not None for state in states)
    if optimizers or has_parts:
        prefix = optimizers[0][1] if optimizers else ""
        of_model.append(prefix + "zero_pp_rank_{dp}_mp_rank_{mp:02}_optim_states.pt")
    wanted = {
        name.format(dp=dp, mp=mp)
        for name in of_model
        for dp in range(dp_ranks)
        for mp in range(mp_ranks)
    }
    missing = sorted(wanted - read.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise IncompleteCheckpointError(
            f"{directory}: {missing[0]}{more} missing, of {dp_ranks * mp_ranks} ranks: copy the "
            "files of all of them, or take another tag",
            path=directory,
        )


def _of(states: list[dict[str, Any]], key: str) -> int:
    found = [state[key] for state in states if type(state.get(key)) is int]
    return max(found, default=1)
