"""`FeatureStore`: features of nodes, in tables on storage and in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch_geometric.data import FeatureStore as _FeatureStore
from torch_geometric.data import TensorAttr

from penstock.features import Features, ForeseenRows, PendingRows
from penstock.features.batches import on_host

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Name: TypeAlias = tuple[str | None, str]
"""Type of nodes, None where there is one, and what the feature is called."""


_Ahead: TypeAlias = tuple[torch.Tensor, ForeseenRows | PendingRows]
"""An index, so that no other tensor has its identity meanwhile, and what is known of its rows."""

_HOST = torch.device("cpu")


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
        self._ahead: dict[tuple[str | None, str, int], _Ahead] = {}
        for name, value in (features or {}).items():
            if not isinstance(name, str) and len(name) != 2:
                raise TypeError(f"features: {name!r}: a name, or (type of nodes, name)")
            group, attribute = (None, name) if isinstance(name, str) else name
            self.put_tensor(value, group_name=group, attr_name=attribute, index=None)

    def foresee(self, nodes: Mapping[str | None, torch.Tensor]) -> None:
        """Tells the caches of nodes that will be asked for, behind all that they were told of.

        Args:
            nodes: By type; known again by the tensors themselves.
        """
        for name, table, index in self._tables(nodes):
            self._ahead[*name, id(index)] = index, table.foresee(index)

    def begin(
        self, nodes: Mapping[str | None, torch.Tensor], device: torch.device | None = None
    ) -> None:
        """Begins to gather what whoever asks for these nodes next will need.

        Args:
            nodes: As `foresee` was told of them, if it was.
            device: Where rows of tables are to be; None for where the nodes are.
        """
        for name, table, index in self._tables(nodes):
            # What cannot be begun is not foreseen any more either.
            _, known = self._ahead.pop((*name, id(index)), (index, None))
            if known is None:
                known = table.gather_async(index, device=device)
            elif isinstance(known, ForeseenRows):
                known = known.gather_async(device=device)
            self._ahead[*name, id(index)] = index, known

    def forget(self, nodes: Mapping[str | None, torch.Tensor]) -> None:
        """Nobody will ask for these nodes: what was begun goes on by itself."""
        for name, _, index in self._tables(nodes):
            _, known = self._ahead.pop((*name, id(index)), (None, None))
            if isinstance(known, ForeseenRows):
                known.forget()

    def _tables(
        self, nodes: Mapping[str | None, torch.Tensor]
    ) -> Iterator[tuple[Name, Features, torch.Tensor]]:
        """Tables of some types of nodes, always in one order, as caches are told of them."""
        for (group, attribute), held in self._held.items():
            if isinstance(held, Features) and group in nodes:
                yield (group, attribute), held, nodes[group]

    def __getstate__(self) -> dict[str, Any]:
        # In another process nothing is under way.
        return {**self.__dict__, "_ahead": {}}

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        if attr.index is not None:
            raise TypeError("index: features are put as a whole (index=None)")
        if not isinstance(tensor, Features | torch.Tensor):
            try:
                tensor = torch.as_tensor(tensor, device="cpu")
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(
                    f"{attr.attr_name}: {type(tensor).__name__}: a table of penstock.features.open,"
                    " or a tensor"
                ) from error
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
        _, known = self._ahead.pop((attr.group_name, attr.attr_name, id(index)), (None, None))
        if known is not None:
            return known if isinstance(known, PendingRows) else known.gather_async()
        if not isinstance(held, Features):
            return held if index is None else _rows_of(held, index)
        if index is None:
            index = slice(None)
        if isinstance(index, slice):
            index = torch.arange(len(held), device="cpu")[index]
        if not isinstance(index, torch.Tensor):
            index = torch.as_tensor(index, device="cpu")
        return held.gather_async(index)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        return self._held.pop((attr.group_name, attr.attr_name), None) is not None

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        held = self._held.get((attr.group_name, attr.attr_name))
        return None if held is None else tuple(held.shape)

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """Type and name of each."""
        # The caller sets an index on them.
        return [TensorAttr(group, attribute) for group, attribute in self._held]


def _rows_of(held: torch.Tensor, index: Any) -> Any:
    """Rows of a tensor in memory; where the index is, as those of tables, if that is a device."""
    if isinstance(index, torch.Tensor) and index.device not in (held.device, _HOST):
        index, where = on_host(index, "index")
        return held[index].to(where)
    return held[index]
