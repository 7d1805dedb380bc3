"""Names of model parameters, independent of wrappers.

A wrapper is recognized by its type, never by its word in a name: a model may have a child called
``module`` or ``_orig_mod`` that wraps nothing. Colliding names are an error, as one of two tensors
would be lost.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from penstock.errors import UnsupportedStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_WRAPPERS = (
    ("torch.nn.parallel", "DistributedDataParallel", "module"),
    ("torch.nn.parallel", "DataParallel", "module"),
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
"""Modules that wrap another: module path and name of the type, and the wrapped child's name."""

_WORDS = frozenset(word for *_, word in _WRAPPERS)


class Names:
    """Names of the parameters of all models of a training."""

    def __init__(self) -> None:
        self._modules: list[tuple[str, Any]] = []
        self._found: dict[int, tuple[int, str, str]] | None = None

    def add(self, owner: str, module: Any) -> None:
        """Adds the parameters of a model; the first model with a parameter names it."""
        self._modules.append((owner, module))

    def of(self, groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
        """Returns the parameter names of an optimizer's groups; None unless all have one."""
        if self._found is None:
            self._found = {}
            for number, (owner, module) in enumerate(self._modules):
                _put_in_order(module)
                for name, parameter in module.named_parameters():
                    found_as = (number, owner, canonical(module, name))
                    self._found.setdefault(id(parameter), found_as)
        known_of = self._found
        found = [[known_of.get(id(one)) for one in group["params"]] for group in groups]
        known = [one for group in found for one in group if one is not None]
        if len(known) != sum(map(len, found)):
            return None
        is_one_model = len({number for number, *_ in known}) <= 1
        named = [
            [name if is_one_model else f"{owner}.{name}" for _, owner, name in filter(None, group)]
            for group in found
        ]
        check_one_to_one((name for group in named for name in group), "the parameters of models")
        return named


def _put_in_order(module: Any) -> None:
    """Reshards sharded modules, which may be unsharded after a forward pass."""
    for one in module.modules():
        reshard = getattr(one, "reshard", None)
        if reshard is not None and hasattr(one, "unshard"):
            reshard()


def bare(module: Any, name: str) -> Any:
    """Returns a model without its outer wrappers."""
    while (word := wrapping_word(module)) is not None:
        further = [
            *(key for key in module._modules if key != word),
            *(key for key, one in module._parameters.items() if one is not None),
            *(key for key, one in module._buffers.items() if one is not None),
        ]
        if further:
            raise UnsupportedStateError(
                f"{name}: {type(module).__name__} has {further[0]!r} beside the model that it "
                "wraps, and would lose it: add it to the model before wrapping it",
                key=f"{name}.{further[0]}",
            )
        module = module._modules[word]
    return module


def canonical(module: Any, name: str) -> str:
    """Returns the name of a parameter, buffer or module without the words of wrappers."""
    if not any(word in name for word in _WORDS):
        return name
    kept = []
    for word in name.split("."):
        wrapping = wrapping_word(module)
        # Activation checkpointing removes its word from a state's names itself.
        while wrapping is not None and wrapping != word and word not in module._modules:
            module = module._modules[wrapping]
            wrapping = wrapping_word(module)
        if word != wrapping:
            kept.append(word)
        module = getattr(module, "_modules", {}).get(word)
    return ".".join(kept)


def check_one_to_one(names: Iterable[str], what: str) -> None:
    """Refuses names that collide without the words of wrappers."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise UnsupportedStateError(
                f"{what}: two are called {name!r} once wrappers are left out: give one of the "
                "modules another name",
                key=name,
            )
        seen.add(name)


def wrapping_word(module: Any) -> str | None:
    """Returns a wrapper's name for the wrapped module; None for a module that wraps none."""
    return next((word for kind, word in _kinds() if isinstance(module, kind)), None)


def _kinds() -> Iterator[tuple[type, str]]:
    """Yields the types of wrappers whose modules are imported; others have no instances."""
    for where, name, word in _WRAPPERS:
        kind = getattr(sys.modules.get(where), name, None)
        if kind is not None:
            yield kind, word
