"""Max-min sharing and transfers in time."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.planning.simulation import Flow, finish_times, max_min


def test_a_resource_is_shared_evenly():
    assert max_min([Flow("a", 1, 3, ("disk",)), Flow("b", 1, 1, ("disk",))], {"disk": 8}) == [2, 2]


def test_a_limited_flow_leaves_its_share_to_others():
    flows = [Flow("slow", 1, 2, ("disk",), limit=1), Flow("fast", 1, 2, ("disk",))]
    assert max_min(flows, {"disk": 10}) == [1, 4]


def test_two_resources():
    """The textbook's example: one flow over both links, one over each."""
    flows = [Flow("both", 1, 1, ("a", "b")), Flow("a", 1, 1, ("a",)), Flow("b", 1, 1, ("b",))]
    assert max_min(flows, {"a": 10, "b": 4}) == [2, 8, 2]


def test_max_min_is_fair():
    """No flow can have more without one of at most its rate having less."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        names = [f"r{index}" for index in range(generator.integers(1, 5))]
        capacities = {name: float(generator.uniform(1, 100)) for name in names}
        flows = [
            Flow(
                str(index),
                1,
                int(generator.integers(1, 6)),
                tuple(
                    generator.choice(names, generator.integers(1, len(names) + 1), replace=False)
                ),
                float(generator.choice([np.inf, generator.uniform(0.1, 30)])),
            )
            for index in range(generator.integers(1, 7))
        ]
        rates = max_min(flows, capacities)
        used = dict.fromkeys(names, 0.0)
        for flow, rate in zip(flows, rates, strict=True):
            for name in flow.through:
                used[name] += rate * flow.count
        for name in names:
            assert used[name] <= capacities[name] * (1 + 1e-9)
        for flow, rate in zip(flows, rates, strict=True):
            if rate >= flow.limit * (1 - 1e-9):
                continue
            full = [name for name in flow.through if used[name] >= capacities[name] * (1 - 1e-9)]
            assert any(
                rate
                >= max(r for f, r in zip(flows, rates, strict=True) if name in f.through)
                * (1 - 1e-9)
                for name in full
            )


def test_transfers_speed_up_when_others_end():
    flows = [Flow("short", 10, 1, ("disk",)), Flow("long", 30, 1, ("disk",))]
    assert finish_times(flows, {"disk": 10}) == pytest.approx([2, 4])
    later = [Flow("first", 20, 1, ("disk",)), Flow("second", 10, 1, ("disk",), begins=1)]
    assert finish_times(later, {"disk": 10}) == pytest.approx([3, 3])


def test_bytes_are_conserved():
    generator = np.random.default_rng(1)
    flows = [
        Flow(str(i), float(generator.uniform(0, 50)), int(generator.integers(1, 4)), ("disk",))
        for i in range(20)
    ]
    total = sum(flow.bytes_each * flow.count for flow in flows)
    assert max(finish_times(flows, {"disk": 7.0})) == pytest.approx(total / 7, rel=1e-9)


def test_senseless_flows_are_refused():
    with pytest.raises(ValueError, match="no resource"):
        max_min([Flow("a", 1, 1, ("disk",))], {})
    with pytest.raises(ValueError, match="no limit"):
        max_min([Flow("a", 1)], {})
    with pytest.raises(ValueError, match="never ends"):
        finish_times([Flow("a", 1, 1, ("disk",))], {"disk": 0.0})
    assert finish_times([Flow("a", 0, 1, ("disk",), begins=3)], {"disk": 1}) == [3]
