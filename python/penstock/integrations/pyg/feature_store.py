"""`FeatureStore`: node features, in tables on storage and in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch_geometric.data import FeatureStore as _FeatureStore
from torch_geometric.data import TensorAttr

from penstock.features import Features, HintedRows, PendingRows
from penstock.features.gathering.batches import on_host

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Name: TypeAlias = tuple[str | None, str]
"""Node type (None if there is only one), and name of the feature."""


_Ahead: TypeAlias = tuple[torch.Tensor, HintedRows | PendingRows]
"""An index, kept so that its id stays unique, and the state of its rows."""

_HOST = torch.device("cpu")


class FeatureStore(_FeatureStore):  # type: ignore[misc]
    """Node features by type and name: the first part of a tuple ``(FeatureStore, GraphStore)``.

    Args:
        features: By name (``"x"``), or by node type and name (``("paper", "x")``): a table
            (`penstock.features.open`), or a tensor in memory, as for labels.

    Raises:
        TypeError: A value is neither.
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

    def hint(self, nodes: Mapping[str | None, torch.Tensor]) -> None:
        """Announces nodes to the caches, after all those announced before.

        Args:
            nodes: Nodes by type; later calls recognize them by the tensor objects.
        """
        for name, table, index in self._tables(nodes):
            self._ahead[*name, id(index)] = index, table.hint(index)

    def begin(
        self, nodes: Mapping[str | None, torch.Tensor], device: torch.device | None = None
    ) -> None:
        """Starts to gather the features of nodes, for the next request of them.

        Args:
            nodes: Nodes by type, announced or not.
            device: Where rows of tables go; None for the device of the nodes.
        """
        for name, table, index in self._tables(nodes):
            # If the gather cannot start, the announcement is dropped, too.
            _, known = self._ahead.pop((*name, id(index)), (index, None))
            if known is None:
                known = table.gather_async(index, device=device)
            elif isinstance(known, HintedRows):
                known = known.gather_async(device=device)
            self._ahead[*name, id(index)] = index, known

    def forget(self, nodes: Mapping[str | None, torch.Tensor]) -> None:
        """Withdraws announcements of nodes; started gathers finish by themselves."""
        for name, _, index in self._tables(nodes):
            _, known = self._ahead.pop((*name, id(index)), (None, None))
            if isinstance(known, HintedRows):
                known.forget()

    def _tables(
        self, nodes: Mapping[str | None, torch.Tensor]
    ) -> Iterator[tuple[Name, Features, torch.Tensor]]:
        """The tables of some node types, always in the order of their announcement."""
        for (group, attribute), held in self._held.items():
            if isinstance(held, Features) and group in nodes:
                yield (group, attribute), held, nodes[group]

    def __getstate__(self) -> dict[str, Any]:
        # No gathers are in progress in another process.
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
        # Starts all gathers before waiting for the first.
        found = [self._requested(attr) for attr in attrs]
        return [one.result() if isinstance(one, PendingRows) else one for one in found]

    def _get_tensor(self, attr: TensorAttr) -> Any:
        return self._multi_get_tensor([attr])[0]

    def _requested(self, attr: TensorAttr) -> Any:
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
        """Type and name of each feature."""
        # New objects, as the caller sets an index on them.
        return [TensorAttr(group, attribute) for group, attribute in self._held]


def _rows_of(held: torch.Tensor, index: Any) -> Any:
    """Rows of a tensor in memory, on the index's device, as for tables."""
    if isinstance(index, torch.Tensor) and index.device not in (held.device, _HOST):
        index, where = on_host(index, "index")
        return held[index].to(where)
    return held[index]
