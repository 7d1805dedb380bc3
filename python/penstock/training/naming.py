"""What the parameters of models are called, however the models are wrapped."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WRAPPING = "_checkpoint_wrapped_module."


class Names:
    """What the parameters of all models of a training are called."""

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}
        self._found: dict[int, tuple[str, str]] | None = None

    def add(self, owner: str, module: Any) -> None:
        """Adds those of a model; the first that has a parameter names it."""
        self._modules[owner] = module

    def of(self, groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
        """The names of the parameters of an optimizer's groups; None unless all have one."""
        if self._found is None:
            self._found = {}
            for owner, module in self._modules.items():
                _put_in_order(module)
                for name, parameter in module.named_parameters():
                    self._found.setdefault(id(parameter), (owner, canonical(module, name)))
        known_of = self._found
        found = [[known_of.get(id(one)) for one in group["params"]] for group in groups]
        known = [one for group in found for one in group if one is not None]
        if len(known) != sum(map(len, found)):
            return None
        is_one_model = len({owner for owner, _ in known}) <= 1
        return [
            [one[1] if is_one_model else ".".join(one) for one in group if one is not None]
            for group in found
        ]


def _put_in_order(module: Any) -> None:
    """Has modules that are sharded show their shards: after a forward, they may show all."""
    for one in module.modules():
        reshard = getattr(one, "reshard", None)
        if reshard is not None and hasattr(one, "unshard"):
            reshard()


def bare(module: Any) -> Any:
    """A model without what it is wrapped in as a whole."""
    while True:
        if _is_replicated(module):
            module = module.module
        elif "_orig_mod" in getattr(module, "_modules", ()):
            module = module._orig_mod
        else:
            return module


def canonical(module: Any, name: str) -> str:
    """The name of a parameter or buffer without the words that wrappers add."""
    name = name.replace(_WRAPPING, "")
    if "_orig_mod" not in name and "module" not in name:
        return name
    kept = []
    for word in name.split("."):
        is_wrapper = word == "_orig_mod" or (word == "module" and _is_replicated(module))
        if not is_wrapper:
            kept.append(word)
        module = getattr(module, word, None)
    return ".".join(kept)


def _is_replicated(module: Any) -> bool:
    torch = sys.modules["torch"]
    parallel = torch.nn.parallel
    return isinstance(module, parallel.DistributedDataParallel | parallel.DataParallel)
