"""Removes the words that wrappers add to the names of a model's tensors.

A state holds no modules, so wrappers are recognized by names alone: a wrapper's word is the only
child of its prefix. A model that has a child of that name beside others keeps it. A model whose
only child has that name cannot be told from a wrapper: the report of the save names the removed
word.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_ANYWHERE = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Words of `torch.compile`, FSDP and activation checkpointing; they may occur anywhere."""

_IN_FRONT = "module"
"""The word that `DistributedDataParallel` puts in front of all names."""

_COUNTER = "n_averaged"
"""The buffer of `AveragedModel`, next to the model, which it calls ``module``."""


def final_names(names: Iterable[str]) -> dict[str, str]:
    """Returns the model's own name of each tensor of a wrapped model; one-to-one.

    Names that would collide, such as the counters of averages of averages, stay unchanged.

    Args:
        names: The names of all tensors of the model.

    Example:
        >>> final_names(["module._orig_mod.layers.0.weight", "module._orig_mod.head.weight"])
        {'module._orig_mod.layers.0.weight': 'layers.0.weight', 'module._orig_mod.head.weight': \
'head.weight'}
        >>> final_names(["module.weight", "head.weight"])
        {'module.weight': 'module.weight', 'head.weight': 'head.weight'}
    """
    listed = list(names)
    if not any(word in name for name in listed for word in (*_ANYWHERE, _IN_FRONT)):
        return {name: name for name in listed}
    following: dict[str, set[str]] = {}
    ends = set(listed)
    for name in listed:
        prefix = ""
        for word in name.split("."):
            following.setdefault(prefix, set()).add(word)
            prefix = f"{prefix}.{word}" if prefix else word
    return _one_to_one({name: _final(name, following, ends) for name in listed})


def _one_to_one(final_of: dict[str, str]) -> dict[str, str]:
    """Restores the original names where two would collide."""
    while True:
        counts = Counter(final_of.values())
        met = [name for name, final in final_of.items() if counts[final] > 1 and name != final]
        if not met:
            return final_of
        final_of |= {name: name for name in met}


def _final(name: str, following: dict[str, set[str]], ends: set[str]) -> str:
    kept: list[str] = []
    prefix = ""
    for word in name.split("."):
        siblings = following[prefix]
        is_wrapper = word in _ANYWHERE and siblings == {word}
        if word == _IN_FRONT and not kept:
            counter = f"{prefix}.{_COUNTER}" if prefix else _COUNTER
            is_wrapper = siblings - ({_COUNTER} if counter in ends else set()) == {word}
        prefix = f"{prefix}.{word}" if prefix else word
        # A tensor of that name is no module, so it wraps nothing.
        if not is_wrapper or prefix in ends:
            kept.append(word)
    return ".".join(kept)
