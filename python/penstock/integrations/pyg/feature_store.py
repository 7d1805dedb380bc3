"""`FeatureStore`: features of nodes, in tables on storage and in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch_geometric.data import FeatureStore as _FeatureStore
from torch_geometric.data import TensorAttr

from penstock.features import Features, PendingRows

if TYPE_CHECKING:
    from collections.abc import Mapping

Name: TypeAlias = tuple[str | None, str]
"""Type of nodes, None where there is one, and what the feature is called."""


class FeatureStore(_FeatureStore):  # type: ignore[misc]
    """Features of nodes by type and name: what a tuple ``(FeatureStore, GraphStore)`` has.

    Args:
        features: By name (``"x"``), or by type of nodes and name (``("paper", "x")``): a table
            (`penstock.features.open`), or a tensor in memory, as of labels.

    Raises:
        TypeError: One is neither.
    """

    def __init__(self, features: Mapping[str | tuple[str, str], Any] | None = None) -> None:
        super().__init__()
        self._held: dict[Name, Any] = {}
        self._begun: dict[tuple[str | None, str, int], tuple[torch.Tensor, PendingRows]] = {}
        for name, value in (features or {}).items():
            group, attribute = (None, name) if isinstance(name, str) else name
            self.put_tensor(value, group_name=group, attr_name=attribute, index=None)

    def begin(self, nodes: Mapping[str | None, torch.Tensor]) -> None:
        """Begins to gather what whoever asks for these nodes next will need.

        Args:
            nodes: By type; known again by the tensors themselves.
        """
        for (group, attribute), held in self._held.items():
            if isinstance(held, Features) and group in nodes:
                index = nodes[group]
                # With the index, so that no other tensor has its identity meanwhile.
                self._begun[group, attribute, id(index)] = index, held.gather_async(index)

    def forget(self, nodes: Mapping[str | None, torch.Tensor]) -> None:
        """Nobody will ask for these nodes: what was begun goes on by itself."""
        for group, attribute in self._held:
            self._begun.pop((group, attribute, id(nodes.get(group))), None)

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        if attr.index is not None:
            raise TypeError("index: features are put as a whole (index=None)")
        if not isinstance(tensor, Features):
            tensor = torch.as_tensor(tensor)
        self._held[attr.group_name, attr.attr_name] = tensor
        return True

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Any]:
        # All are under way before one is waited for.
        found = [self._asked_for(attr) for attr in attrs]
        return [one.result() if isinstance(one, PendingRows) else one for one in found]

    def _get_tensor(self, attr: TensorAttr) -> Any:
        return self._multi_get_tensor([attr])[0]

    def _asked_for(self, attr: TensorAttr) -> Any:
        held = self._held.get((attr.group_name, attr.attr_name))
        if held is None:
            return None
        index = attr.index
        begun = self._begun.pop((attr.group_name, attr.attr_name, id(index)), None)
        if begun is not None:
            return begun[1]
        if not isinstance(held, Features):
            return held if index is None else held[index]
        if index is None:
            index = slice(None)
        if isinstance(index, slice):
            index = torch.arange(len(held))[index]
        return held.gather_async(torch.as_tensor(index))

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._held.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        held = self._held.get((attr.group_name, attr.attr_name))
        return None if held is None else tuple(held.shape)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Type and name of each."""
        # The caller sets an index on them.
        return [TensorAttr(group, attribute) for group, attribute in self._held]
