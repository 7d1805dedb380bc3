"""Each target of a load has one route, and there is a source of its bytes at the other end."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._native import TensorEntry
from penstock.checkpoint.layout.boxes import Box
from penstock.checkpoint.loading.device_tensors import DEVICE_STAGING_BYTES
from penstock.checkpoint.loading.route import Route, choose_routes
from penstock.checkpoint.loading.target import Target
from penstock.checkpoint.view.view import View
from penstock.tensors.devices import DeviceStream
from penstock.tensors.memory import Memory

ITEM_BYTES = 4
SHAPE = (4, 256)
RUN = None
"""Strides of contiguous memory, in bytes; those below are of longer rows, and of a transpose."""
ROWS = (8192, ITEM_BYTES)
TURNED = (ITEM_BYTES, 16)
TURNED_WINDOW = (SHAPE, (1, 4), 0)
WHOLE_BOX = [Box((0, 0), SHAPE, (0, 0))]


class Owner:
    """A tensor, of which only the device counts here."""

    def __init__(self, device):
        self.device = device


def target(device="cpu", strides=RUN, *, index=0, at=4096, window=None, boxes=None, value=None):
    """Returns a target; ``at`` is None for memory without an address of its own."""
    shape = (0, 256) if boxes == [] else SHAPE
    low, high = (0, 0) if at is None or boxes == [] else (at, at + (1 << 16))
    memory = Memory(Owner(device), "float32", ITEM_BYTES, shape, strides, low, low, high, device)
    place = DeviceStream(0, 0) if device.startswith("cuda") and low else None
    return Target("w", value, memory, {}, index, window, boxes, place)


def chosen(targets, *, wholes=(), on_host=(), nbytes=4096):
    """Returns the routes of targets by their identities, and the devices."""
    entries = [TensorEntry("w", "float32", SHAPE, "shard-0", 0, nbytes)] * 3
    known = {index: f"g{index}" for index in wholes}
    seen = View({}, entries, [], known, {}, lost=(), is_shared=bool(known), tree_chars=0)
    routes = choose_routes(targets, seen, set(on_host))
    found = {id(one): route for route, some in routes.targets.items() for one in some}
    assert sum(map(len, routes.targets.values())) == len(targets) == len(found)
    return [found[id(one)] for one in targets], routes.devices


ALONE = {
    "host": (target(), Route.IN_PLACE),
    "strided": (target(strides=TURNED), Route.HOST_COPY),
    "window": (target(window=TURNED_WINDOW), Route.HOST_COPY),
    "no address": (target(at=None), Route.HOST_COPY),
    "part": (target(boxes=WHOLE_BOX), Route.BOXES),
    "strided part": (target(strides=TURNED, boxes=WHOLE_BOX), Route.BOXES),
    "part without address": (target(at=None, boxes=WHOLE_BOX), Route.HOST_PART),
    "part of a window": (target(window=TURNED_WINDOW, boxes=WHOLE_BOX), Route.HOST_COPY),
    "no part": (target(boxes=[]), Route.NOTHING),
    "no part of a window": (target(window=TURNED_WINDOW, boxes=[]), Route.NOTHING),
    "device": (target("cuda:0"), Route.IN_PLACE),
    "device, rows": (target("cuda:0", ROWS), Route.IN_PLACE),
    "device, scattered": (target("cuda:0", TURNED), Route.DEVICE_COPY),
    "device, window": (target("cuda:0", window=TURNED_WINDOW), Route.DEVICE_COPY),
    "device, part": (target("cuda:0", boxes=WHOLE_BOX), Route.BOXES),
    "device, scattered part": (target("cuda:0", TURNED, boxes=WHOLE_BOX), Route.HOST_PART),
    "no driver": (target("xpu:0"), Route.HOST_COPY),
    "no driver, part": (target("xpu:0", boxes=WHOLE_BOX), Route.HOST_PART),
}


@pytest.mark.parametrize("case", ALONE)
def test_the_route_of_a_target(case):
    one, route = ALONE[case]
    routes, devices = chosen([one])
    assert routes == [route]
    assert set(devices) == ({0} if route is Route.DEVICE_COPY else set())


def test_a_tensor_in_boxes_of_several_ranks_is_assembled_where_it_belongs():
    assert chosen([target()], wholes=[0])[0] == [Route.BOXES]
    assert chosen([target(strides=TURNED)], wholes=[0])[0] == [Route.BOXES]
    assert chosen([target("cuda:0", TURNED)], wholes=[0])[0] == [Route.DEVICE_COPY]


def test_targets_of_one_tensor_are_copied_from_the_one_on_the_host():
    routes, _ = chosen([target("cuda:0"), target(at=1 << 20), target(), target(at=1 << 20)])
    assert routes == [Route.TARGET_COPY, Route.IN_PLACE, Route.TARGET_COPY, Route.ALIAS]
    own = [target(), target(window=(SHAPE, (256, 1), 0)), target(at=1 << 20, window=TURNED_WINDOW)]
    assert chosen(own, wholes=[0])[0] == [Route.BOXES, Route.ALIAS, Route.HOST_COPY]


def test_a_tensor_that_the_host_needs_is_read_there_alone():
    for on_host, other in (([0], target(index=1)), ([], target(value=np.zeros(1)))):
        routes, devices = chosen([target("cuda:0", TURNED), other], on_host=on_host)
        assert routes[0] in (Route.HOST_COPY, Route.TARGET_COPY)
        assert devices == {}


def test_windows_are_copied_from_contiguous_memory_and_not_from_any_amount_of_a_devices():
    window = target("cuda:0", window=TURNED_WINDOW, at=1 << 20)
    assert chosen([target("cuda:0", ROWS), window])[0] == [Route.DEVICE_COPY] * 2
    assert chosen([target("cuda:0"), window])[0] == [Route.IN_PLACE, Route.TARGET_COPY]
    assert chosen([window], nbytes=DEVICE_STAGING_BYTES + 1)[0] == [Route.HOST_COPY]


@st.composite
def mixed(draw):
    """Draws targets that share no memory, or all of it."""
    found, addresses = [], count(1 << 20, 1 << 20)
    for _ in range(draw(st.integers(1, 6))):
        one = {
            "device": draw(st.sampled_from(["cpu", "cuda:0", "cuda:1", "xpu:0"])),
            "strides": draw(st.sampled_from([RUN, RUN, ROWS, TURNED])),
            "index": draw(st.integers(0, 2)),
            "at": draw(st.sampled_from([next(addresses), None])),
            "window": draw(st.sampled_from([None, None, TURNED_WINDOW])),
            "boxes": draw(st.sampled_from([None, None, WHOLE_BOX, []])),
        }
        found += [target(**one) for _ in range(draw(st.integers(1, 2)))]
    return found


@given(mixed(), st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2)))
def test_every_route_has_its_source(targets, wholes, on_host):
    routes, devices = chosen(targets, wholes=wholes, on_host=on_host)
    pairs = list(zip(targets, routes, strict=True))
    in_place = [one.index for one, route in pairs if route is Route.IN_PLACE]
    assert len(in_place) == len(set(in_place))
    assert not wholes.intersection(in_place)
    filled = {one.claim for one, route in pairs if route in (Route.IN_PLACE, Route.BOXES)}
    for one, route in pairs:
        assert route is not Route.ALIAS or one.claim in filled
        assert route is not Route.TARGET_COPY or one.index in in_place
        assert (one.index in in_place) + (one.index in devices) <= 1
        if route in (Route.DEVICE_COPY, Route.HOST_COPY):
            assert (one.index in devices) == (route is Route.DEVICE_COPY)
            assert one.index not in in_place
    assert not on_host.intersection(devices)
