"""`rank`: orders a graph's nodes by how often their rows are likely to be read."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from penstock.common.option_kinds import Number
from penstock.features.gathering.ids import to_array
from penstock.tensors import dtypes

By = Literal["degree", "counts", "reverse_pagerank"]

_Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_NODES = Number(0, (1 << 63) - 1, "nodes", is_open=False)
_ROUNDS = Number(1, (1 << 63) - 1, "rounds", is_open=False)

_EDGES_AT_ONCE = 1 << 24
"""Edges whose scores are computed at a time: 256 MiB of them."""


def rank(
    *,
    by: By,
    colptr: Any = None,
    row: Any = None,
    counts: Any = None,
    nodes: int | None = None,
    top: int | None = None,
    damping: float = 0.85,
    rounds: int = 20,
) -> _Array:
    """Returns ids of nodes, those likely to be read most often first: a hot set to pin.

    The graph has the form that neighbour samplers take, compressed columns: node ``v`` samples from
    the nodes ``row[colptr[v] : colptr[v + 1]]``. Arrays are of NumPy or PyTorch, in host memory. To
    pin all nodes of a type no rank is needed: pin ``range(rows)``.

    Args:
        by: ``"degree"``: the number of nodes that have a node as neighbour. ``"reverse_pagerank"``:
            how often random walks against the edges, the way samplers go, visit a node, as GIDS
            ranks the nodes it keeps in memory (Park et al., VLDB 2024). ``"counts"``: how often
            each
            node was read, as counted in an epoch.
        colptr: Begin of each node's neighbours in ``row``, followed by the length of ``row``.
        row: The neighbours.
        counts: The count of each node, for ``"counts"``.
        nodes: Number of nodes to rank with ``"degree"``, where ``row`` holds nodes of another type
            than ``colptr``. Default: the nodes of ``colptr``.
        top: The number of ids to return; None for all.
        damping: The share of walks that continue at each step of ``"reverse_pagerank"``.
        rounds: The number of steps.

    Returns:
        Ids of type ``int64``; of equal nodes the smaller id comes first.

    Raises:
        TypeError: An array is missing or does not hold integers.
        ValueError: The arrays are no graph, or a number is out of range.

    Example:
        >>> import numpy as np
        >>> from penstock.features import rank
        >>> colptr, row = np.array([0, 2, 3, 4]), np.array([1, 2, 2, 0])
        >>> rank(by="degree", colptr=colptr, row=row).tolist()
        [2, 0, 1]
        >>> rank(by="reverse_pagerank", colptr=colptr, row=row, top=2).tolist()
        [2, 0]
        >>> rank(by="counts", counts=[5, 0, 9]).tolist()
        [2, 0, 1]
    """
    if by not in get_args(By):
        raise ValueError(f"by={by!r}: must be one of {', '.join(get_args(By))}")
    nodes = None if nodes is None else _NODES.whole("nodes", nodes)
    top = None if top is None else _NODES.whole("top", top)
    rounds = _ROUNDS.whole("rounds", rounds)
    if not isinstance(damping, float | int):
        raise TypeError(f"damping={damping!r}: must be a float")
    if by == "counts":
        return _best(_numbers("counts", counts, "iuf"), top)
    starts, sources = _numbers("colptr", colptr, "iu"), _numbers("row", row, "iu")
    if nodes is None:
        nodes = len(starts) - 1
    _check(starts, sources, nodes)
    if by == "degree":
        return _best(np.bincount(sources.astype(np.int64, copy=False), minlength=nodes), top)
    if nodes != len(starts) - 1:
        raise ValueError(
            f"nodes={nodes}: walks come back to the same nodes, of which colptr has"
            f" {len(starts) - 1}"
        )
    if not 0 <= damping < 1:
        raise ValueError(f"damping={damping}: must be at least 0 and less than 1")
    return _best(_reverse_pagerank(starts, sources, damping, rounds), top)


def _numbers(name: str, value: Any, kinds: str) -> _Array:
    if value is None:
        raise TypeError(f"{name}: missing")
    if dtypes.is_tensor(value) and value.device.type != "cpu":
        raise TypeError(f"{name}: a tensor on {value.device}: use one of the host, as of .cpu()")
    found = to_array(value, name)
    if found.size == 0 and not (dtypes.is_tensor(value) or isinstance(value, np.ndarray)):
        found = found.astype(np.int64)
    if found.dtype.kind not in kinds:
        raise TypeError(f"{name}: {found.dtype}: use {'numbers' if 'f' in kinds else 'integers'}")
    if found.ndim != 1:
        raise ValueError(f"{name}: shape {found.shape}: must have one dimension")
    return found


def _check(starts: _Array, sources: _Array, nodes: int) -> None:
    if len(starts) == 0 or starts[0] != 0 or (starts[1:] < starts[:-1]).any():
        raise ValueError("colptr: must begin with 0 and never go down")
    if starts[-1] != len(sources):
        raise ValueError(f"colptr: ends with {starts[-1]}, and row has {len(sources)}")
    if len(sources) and not (sources.min() >= 0 and sources.max() < nodes):
        first = int(np.flatnonzero((sources < 0) | (sources >= nodes))[0])
        raise ValueError(f"row[{first}] is {sources[first]}: there are {nodes} nodes")


def _reverse_pagerank(starts: _Array, sources: _Array, damping: float, rounds: int) -> _Array:
    """The probability of each node after ``rounds`` steps; they add up to 1."""
    nodes = len(starts) - 1
    neighbours = (starts[1:] - starts[:-1]).astype(np.int64)
    has_none = neighbours == 0
    likely = np.full(nodes, 1 / max(nodes, 1))
    for _ in range(rounds):
        # A walk at a node without neighbours jumps anywhere, as does one that is not damped.
        anywhere = damping * likely[has_none].sum() + 1 - damping
        to_each = damping * likely / np.maximum(neighbours, 1)
        likely = np.full(nodes, anywhere / max(nodes, 1))
        for first, last in _pieces(starts):
            edges = slice(int(starts[first]), int(starts[last]))
            weights = np.repeat(to_each[first:last], neighbours[first:last])
            likely += np.bincount(
                sources[edges].astype(np.int64, copy=False), weights, minlength=nodes
            )
    return likely


def _pieces(starts: _Array) -> list[tuple[int, int]]:
    """Ranges of nodes with at most `_EDGES_AT_ONCE` edges each; one node at least."""
    pieces, first, nodes = [], 0, len(starts) - 1
    while first < nodes:
        limit = int(starts[first]) + _EDGES_AT_ONCE
        last = max(int(np.searchsorted(starts, limit, side="right")) - 1, first + 1)
        pieces.append((first, last))
        first = last
    return pieces


def _best(scores: _Array, top: int | None) -> _Array:
    """Positions of the largest scores, the largest first."""
    if np.isnan(scores).any():
        raise ValueError("counts: not a number")
    if top is None or top >= len(scores):
        ids = np.arange(len(scores))
    elif top == 0:
        ids = np.arange(0)
    else:
        # Partitioning first: sorting all scores would take most of the time.
        least = np.partition(scores, len(scores) - top)[len(scores) - top]
        more, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
        ids = np.sort(np.concatenate([more, equal[: top - len(more)]]))
    # Reversed twice: a stable descending order that does not negate unsigned numbers.
    found: _Array = ids[::-1][np.argsort(scores[ids][::-1], kind="stable")][::-1]
    return np.ascontiguousarray(found, np.int64)
