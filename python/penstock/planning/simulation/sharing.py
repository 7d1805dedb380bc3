"""Max-min sharing of links, drives and file systems, and transfers in time.

A flow uses some resources; each resource divides its bytes per second among its flows. Max-min
fairness raises all flows together until a resource is full, fixes the flows of that one, and goes
on with the others (Bertsekas and Gallager, Data Networks, 6.5.2). TCP and striped file systems come
near to it, and it needs no queue of requests: a transfer of a terabyte is one event.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Flow:
    """Equal transfers that begin together.

    Attributes:
        name: Name in results.
        bytes_each: Bytes of one of them.
        count: Number of them.
        through: Names of the resources that each uses; a resource of its own, as the drive of a
            host, is a limit instead.
        limit: Most bytes per second of one, from resources of its own; inf for none.
        begins: Second at which they begin.
    """

    name: str
    bytes_each: float
    count: int = 1
    through: tuple[str, ...] = ()
    limit: float = math.inf
    begins: float = 0.0


def max_min(flows: Sequence[Flow], capacities: Mapping[str, float]) -> list[float]:
    """Bytes per second of each flow's single transfers.

    Args:
        flows: The flows; those of no transfers get no rate.
        capacities: Bytes per second of each resource.

    Raises:
        ValueError: A flow uses an unknown resource, or is limited by none.
    """
    rates = [0.0] * len(flows)
    left = dict(capacities)
    open_flows = set(range(len(flows)))
    for index, flow in enumerate(flows):
        unknown = [one for one in flow.through if one not in left]
        if unknown:
            raise ValueError(f"flow {flow.name!r} uses {unknown[0]!r}, which is no resource")
        if not flow.through and not math.isfinite(flow.limit):
            raise ValueError(f"flow {flow.name!r} has no limit and uses no resource")
        if flow.count < 1:
            open_flows.discard(index)
    while open_flows:
        share = min(
            [left[name] / users for name, users in _users(flows, open_flows).items()],
            default=math.inf,
        )
        limited = [index for index in open_flows if flows[index].limit <= share]
        if limited:
            fixed = {index: flows[index].limit for index in limited}
        else:
            full = {
                name
                for name, users in _users(flows, open_flows).items()
                if left[name] / users <= share * (1 + 1e-12)
            }
            fixed = {index: share for index in open_flows if full & set(flows[index].through)}
        for index, rate in fixed.items():
            rates[index] = rate
            open_flows.discard(index)
            for name in flows[index].through:
                left[name] = max(0.0, left[name] - rate * flows[index].count)
    return rates


def _users(flows: Sequence[Flow], indices: set[int]) -> dict[str, int]:
    users: dict[str, int] = {}
    for index in indices:
        for name in flows[index].through:
            users[name] = users.get(name, 0) + flows[index].count
    return users


def finish_times(flows: Sequence[Flow], capacities: Mapping[str, float]) -> list[float]:
    """Second at which each flow ends, if rates are shared anew whenever one begins or ends.

    Raises:
        ValueError: A flow cannot end, as a resource that it uses moves nothing.
    """
    left = [flow.bytes_each for flow in flows]
    ends = [flow.begins if flow.bytes_each <= 0 or flow.count < 1 else math.inf for flow in flows]
    now = 0.0
    while any(math.isinf(end) for end in ends):
        waiting = [i for i, end in enumerate(ends) if math.isinf(end)]
        running = [i for i in waiting if flows[i].begins <= now]
        rates = max_min([flows[i] for i in running], capacities)
        until = min((flows[i].begins for i in waiting if flows[i].begins > now), default=math.inf)
        for index, rate in zip(running, rates, strict=True):
            if rate > 0:
                until = min(until, now + left[index] / rate)
        if math.isinf(until):
            raise ValueError(f"flow {flows[waiting[0]].name!r} never ends: nothing is left for it")
        for index, rate in zip(running, rates, strict=True):
            left[index] -= rate * (until - now)
            if left[index] <= 1e-9 * flows[index].bytes_each:
                ends[index] = until
        now = until
    return ends
