"""Which boxes of a tensor each rank holds, and which it writes; in a single process."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import penstock
from penstock.checkpoint.layout.boxes import Box, Cut, boxes
from penstock.checkpoint.layout.fingerprints import device_digest, fingerprints
from penstock.checkpoint.layout.sharding import Balance, Sharder, Sharding, is_balanced
from penstock.checkpoint.layout.sharing import PIECE_BYTES_MIN, HeldBox, share_out
from penstock.checkpoint.ranks.group import Ranks
from penstock.checkpoint.ranks.mailbox import Mailbox
from penstock.checkpoint.ranks.members import Members
from penstock.checkpoint.saving.sharded import flatten_sharded
from penstock.errors import StateMismatchError, UnsupportedStateError
from penstock.tensors.memory import of_tensor

pytestmark = pytest.mark.skipif(
    _StridedShard is None, reason="PyTorch before 2.5 has no strided placement"
)

FAMILY = settings(max_examples=300, deadline=None, print_blob=True)
SLOW_FAMILY = settings(max_examples=60, deadline=None, print_blob=True)

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
RANKS = 8


@contextmanager
def as_rank(rank, size=RANKS):
    """Makes this process one of many ranks, by PyTorch's fake group without real collectives."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def cuts_of(placements, mesh, coordinate):
    """Returns cuts as `penstock.checkpoint.layout.sharding` makes them from a `DTensor`."""
    return [
        Cut(placement.dim, pieces, index, getattr(placement, "split_factor", 1))
        for placement, pieces, index in zip(placements, mesh, coordinate, strict=True)
        if not isinstance(placement, Replicate)
    ]


def held_indices(shape, placements, mesh, coordinate):
    """Returns the indices of the elements that PyTorch places on a rank."""
    held = torch.arange(math.prod(shape)).reshape(shape)
    for placement, pieces, index in zip(placements, mesh, coordinate, strict=True):
        if not isinstance(placement, Replicate):
            parts, _ = placement._split_tensor(held, pieces, with_padding=False, contiguous=False)
            held = parts[index]
    return held


def gathered(found, shape, local_shape):
    """Builds the local tensor of indices from boxes; checks that each element is there once."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    local = torch.full(local_shape, -1)
    for box in found:
        wanted = tuple(
            slice(low, low + size) for low, size in zip(box.start, box.shape, strict=True)
        )
        place = tuple(slice(low, low + size) for low, size in zip(box.at, box.shape, strict=True))
        assert (local[place] == -1).all()
        local[place] = whole[wanted]
    assert (local >= 0).all()
    return local


@st.composite
def layouts(draw, kinds=("replicate", "shard", "strided")):
    """Draws a shape, a mesh and placements."""
    shape, mesh = draw(SHAPES), draw(MESHES)
    placements = []
    for _ in mesh:
        kind, dim = draw(st.sampled_from(kinds)), draw(st.integers(0, len(shape) - 1))
        if kind == "replicate":
            placements.append(Replicate())
        elif kind == "shard":
            placements.append(Shard(dim))
        else:
            placements.append(_StridedShard(dim, split_factor=draw(st.integers(1, 4))))
    return shape, mesh, placements


def coordinates(mesh):
    return itertools.product(*map(range, mesh))


@FAMILY
@given(layout=layouts())
def test_boxes_describe_what_pytorch_puts_on_a_rank(layout):
    shape, mesh, placements = layout
    for coordinate in coordinates(mesh):
        expected = held_indices(shape, placements, mesh, coordinate)
        found = boxes(shape, cuts_of(placements, mesh, coordinate))
        assert torch.equal(gathered(found, shape, expected.shape), expected)


@FAMILY
@given(layout=layouts(kinds=("replicate", "shard")))
def test_boxes_are_where_pytorch_computes_them(layout):
    shape, mesh, placements = layout
    for coordinate in coordinates(mesh):
        local_shape, offset = _compute_local_shape_and_global_offset(
            shape, mesh, list(coordinate), placements
        )
        found = boxes(shape, cuts_of(placements, mesh, coordinate))
        if 0 in local_shape:
            assert not any(math.prod(box.shape) for box in found)
        else:
            assert found == [Box(tuple(offset), tuple(local_shape), (0,) * len(shape))]


@FAMILY
@given(rows=st.integers(0, 60), data=st.integers(1, 6), tensor=st.integers(1, 6))
def test_boxes_of_fsdp_over_tensor_parallelism_are_what_fsdp_made_or_show_that_they_are_not(
    rows, data, tensor
):
    """FSDP cuts the shards of tensor parallelism, whatever the order of the mesh's dimensions.

    If the sizes do not divide evenly, PyTorch's placements do not describe FSDP's shards.
    """
    placements, mesh = [_StridedShard(0, split_factor=tensor), Shard(0)], (data, tensor)
    differ = False
    for coordinate in coordinates(mesh):
        held = torch.arange(rows)
        for pieces, index in ((tensor, coordinate[1]), (data, coordinate[0])):
            parts = held.chunk(pieces)
            held = parts[index] if index < len(parts) else held[:0]
        found = boxes((rows,), cuts_of(placements, mesh, coordinate))
        count = sum(box.shape[0] for box in found)
        if count != len(held):
            differ = True
        elif not differ:
            assert torch.equal(gathered(found, (rows,), (count,)), held)
    assert not (differ and rows % tensor == 0)


@FAMILY
@given(layout=layouts())
def test_every_element_is_on_as_many_ranks_as_replicate_it(layout):
    shape, mesh, placements = layout
    times = torch.zeros(shape, dtype=torch.int64)
    for coordinate in coordinates(mesh):
        for box in boxes(shape, cuts_of(placements, mesh, coordinate)):
            place = zip(box.start, box.shape, strict=True)
            times[tuple(slice(low, low + size) for low, size in place)] += 1
    copies = math.prod(
        pieces
        for placement, pieces in zip(placements, mesh, strict=True)
        if isinstance(placement, Replicate)
    )
    assert (times == copies).all()


# Which rank writes which box.


@st.composite
def wishes(draw):
    """Draws boxes of several tensors that some ranks share; few large ones, many small."""
    wanted = []
    for tensor in range(draw(st.integers(1, 12))):
        shape = draw(st.lists(st.integers(1, 40), max_size=3).map(tuple))
        start = tuple(draw(st.integers(0, 5)) for _ in shape)
        at = tuple(draw(st.integers(0, 5)) for _ in shape)
        # A large element size makes a large box without using memory.
        item_bytes = draw(st.sampled_from([1, 8, 4 << 10, 1 << 20]))
        wanted.append(HeldBox(tensor, f"t{tensor % 7}", Box(start, shape, at), item_bytes))
    numbers = draw(st.sets(st.integers(0, 40), min_size=1, max_size=9))
    return wanted, Members.of(numbers)


def shares(wanted, replicas):
    return {rank: share_out(wanted, replicas, rank) for rank in replicas.ranks}


def piece_bytes(piece, wanted):
    return math.prod(piece.box.shape) * wanted[piece.tensor].item_bytes


@FAMILY
@given(wish=wishes())
def test_every_element_is_written_by_exactly_one_replica(wish):
    wanted, replicas = wish
    times = {item.tensor: torch.zeros(item.box.shape, dtype=torch.int64) for item in wanted}
    for pieces in shares(wanted, replicas).values():
        for piece in pieces:
            box = wanted[piece.tensor].box
            starts = [p - b for p, b in zip(piece.box.start, box.start, strict=True)]
            assert starts == [p - b for p, b in zip(piece.box.at, box.at, strict=True)]
            place = zip(starts, piece.box.shape, strict=True)
            times[piece.tensor][tuple(slice(low, low + size) for low, size in place)] += 1
    for count in times.values():
        assert (count == 1).all()


@FAMILY
@given(wish=wishes(), seed=st.integers(0, 99))
def test_every_replica_comes_to_the_same_shares_in_whatever_order_it_has_the_tensors(wish, seed):
    wanted, replicas = wish
    other = list(wanted)
    random.Random(seed).shuffle(other)
    for rank in replicas.ranks:
        one, two = share_out(wanted, replicas, rank), share_out(other, replicas, rank)
        assert Counter((wanted[p.tensor].name, p.box) for p in one) == Counter(
            (wanted[p.tensor].name, p.box) for p in two
        )


@FAMILY
@given(wish=wishes())
def test_no_replica_writes_more_than_its_share_and_a_piece(wish):
    wanted, replicas = wish
    written = shares(wanted, replicas)
    sizes = [[piece_bytes(piece, wanted) for piece in pieces] for pieces in written.values()]
    share_bytes = sum(map(sum, sizes)) / len(sizes)
    largest_bytes = max(size for pieces in sizes for size in pieces)
    assert max(map(sum, sizes)) <= share_bytes + largest_bytes


@FAMILY
@given(rows=st.integers(1, 4_000), columns=st.integers(1, 50), ranks=st.integers(2, 9))
def test_one_tensor_is_shared_out_evenly(rows, columns, ranks):
    """Pieces are small compared with a share, or as small as requests should be."""
    row_bytes = 4_096 * columns
    box = Box((0, 0), (rows, columns), (0, 0))
    wanted = [HeldBox(0, "w", box, 4_096)]
    written = shares(wanted, Members.of(range(ranks)))
    loads = [sum(piece_bytes(p, wanted) for p in pieces) for pieces in written.values()]
    share_bytes = rows * row_bytes / ranks
    assert max(loads) <= share_bytes + max(share_bytes / 8, PIECE_BYTES_MIN) + row_bytes


# Whether all ranks saw the same.


def sharding(holders, token=b"token", shape=(4, 2)):
    return Sharding(shape, [], holders, holders, token)


def sums(views):
    """Returns each rank's sum; a view lists the rank's tensors as (name, dtype, sharding)."""
    found = []
    for rank, tensors in enumerate(views):
        balance = Balance(rank)
        for tensor in tensors:
            balance.add(*tensor)
        found.append(balance.sum)
    return found


ALL = Members.of(range(4))
PAIR = Members.of([1, 3])


@FAMILY
@given(
    members=st.lists(
        st.sets(st.integers(0, 5), min_size=1).map(Members.of), min_size=1, max_size=6
    ),
    data=st.data(),
)
def test_ranks_balance_just_when_every_holder_has_every_tensor(members, data):
    views = [
        [(f"t{index}", "float32", sharding(who)) for index, who in enumerate(members)]
        for _ in range(6)
    ]
    held = [
        [row for row in view if rank in row[2].holders.ranks] for rank, view in enumerate(views)
    ]
    for view in held:
        random.Random(len(view)).shuffle(view)
    assert is_balanced(sums(held))
    lonely = data.draw(st.sampled_from([rank for rank in range(6) if held[rank]]))
    lost = data.draw(st.integers(0, len(held[lonely]) - 1))
    alone = len(held[lonely][lost][2].holders.ranks) == 1
    del held[lonely][lost]
    # The other ranks do not know a tensor that only one rank holds.
    assert is_balanced(sums(held)) == alone


@pytest.mark.parametrize(
    "other",
    [
        ("v", "float32", sharding(PAIR)),
        ("w", "float16", sharding(PAIR)),
        ("w", "float32", sharding(PAIR, shape=(2, 4))),
        ("w", "float32", sharding(PAIR, token=b"other placements, or another order of the mesh")),
        ("w", "float32", sharding(ALL)),
    ],
    ids=["name", "dtype", "shape", "placements", "holders"],
)
@pytest.mark.parametrize("rank", PAIR.ranks)
def test_ranks_do_not_balance_where_a_holder_has_another(other, rank):
    same = ("w", "float32", sharding(PAIR))
    views = [[], [same], [], [same]]
    assert is_balanced(sums(views))
    views[rank] = [other]
    assert not is_balanced(sums(views))


WEIGHT = torch.arange(40_000, dtype=torch.float32).reshape(200, 200)
CHANGED = [WEIGHT.clone() for _ in range(3)]
CHANGED[0][0, 0] += 1
CHANGED[1][-1, -1] += 1
CHANGED[2][7, [3, 4]] = WEIGHT[7, [4, 3]]


def mark(name, tensor):
    (found,) = fingerprints([(name, of_tensor(tensor, name))])
    return found


def test_plain_tensors_are_told_apart_by_name_type_shape_and_content():
    others = [
        mark("v", WEIGHT),
        mark("w", WEIGHT.view(torch.int32)),
        mark("w", WEIGHT.view(100, 400)),
        *(mark("w", one) for one in CHANGED),
        mark("w", WEIGHT.t()),
    ]
    assert len({mark("w", WEIGHT), *others}) == 8
    assert mark("w", WEIGHT.clone()) == mark("w", WEIGHT)
    # Strides do not change the digest.
    transposed = WEIGHT.t().contiguous().t()
    assert not transposed.is_contiguous()
    assert mark("w", transposed) == mark("w", WEIGHT)


@pytest.mark.parametrize(
    "dtype",
    ["bool", "bfloat16", "float8_e4m3fn", "uint16", "complex64", "complex128", "float64"],
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_plain_tensors_of_any_type_have_a_fingerprint(dtype, is_transposed):
    one, other = (torch.randint(0, 2, (300, 400)).to(getattr(torch, dtype)) for _ in range(2))
    if is_transposed:
        one, other = one.t(), other.t()
    assert mark("w", one) == mark("w", one.clone()) != mark("w", other)
    # The digest for devices that the native module cannot read.
    digests = [int(device_digest(tensor)) for tensor in (one, one.contiguous(), other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_digest_on_a_device_tells_every_place_and_every_bit(monkeypatch):
    monkeypatch.setattr(penstock.checkpoint.layout.fingerprints, "_CHUNK_ITEMS", 1000)
    words = WEIGHT.view(torch.int32)
    changed = [words]
    for place in (0, 999, 1000, 1001, 20_000, 39_999):
        for bit in (0, 13, 31):
            changed.append(words.clone())
            changed[-1].view(-1)[place] ^= torch.tensor(1 << bit, dtype=torch.int64).int()
    changed += [words.view(-1).roll(1), words.view(-1).roll(1000), words.view(-1).flip(0)]
    assert len({int(device_digest(one)) for one in changed}) == len(changed)


@pytest.mark.parametrize("dtype", ["float64", "complex64", "complex128", "int64", "float32"])
def test_a_digest_on_a_device_tells_numbers_of_few_bits(dtype):
    """Whole numbers as floats, signs, one changed element: only high bits differ."""
    ones = torch.eye(600).to(getattr(torch, dtype))
    some = [*ones, *-ones, *(3 - 2 * ones), torch.zeros_like(ones[0])]
    if ones.is_complex():
        some += [*(1j * ones), *(-1j * ones)]
    assert len({int(device_digest(one)) for one in some}) == len(some)


def test_a_digest_of_nothing():
    assert int(device_digest(torch.zeros(0))) == 0


# Which ranks hold which plain tensors.

HASHES = st.integers(0, 2**64 - 1)


def holders_of(sets):
    """Returns the holders that each rank learns for its own hashes."""
    store = dist.HashStore()
    names = tuple(range(len(sets)))

    def ask(rank):
        one = Ranks(lambda: Mailbox(store, "test"), rank, names).enter("save", 10)
        found = [members.ranks for members in one.holders(sets[rank])]
        # As in a save, a rank leaves only after all have finished.
        assert one.is_true_for_all(True)
        one.leave()
        return found

    with ThreadPoolExecutor(len(sets)) as pool:
        found = list(pool.map(ask, names))
    # The number of ranks per machine is found once, and its key stays.
    assert store.num_keys() == (1 if len(sets) > 1 else 0)
    return found


@SLOW_FAMILY
@given(sets=st.lists(st.sets(st.integers(0, 4) | HASHES), min_size=1, max_size=6))
def test_every_rank_learns_who_has_the_same_plain_tensors(sets):
    sets = [list(one) for one in sets]
    expected = [
        [tuple(rank for rank, other in enumerate(sets) if mark in other) for mark in one]
        for one in sets
    ]
    assert holders_of(sets) == expected


# `DTensor`s, as each of many ranks sees them.


@st.composite
def dtensors(draw):
    """Draws any mesh over some of the ranks in any order, and fitting placements."""
    shape, mesh, placements = draw(layouts())
    ranks = math.prod(mesh)
    if ranks > RANKS:
        mesh, placements = mesh[:1], placements[:1]
        ranks = mesh[0]
    numbers = draw(st.permutations(range(RANKS)))[:ranks]
    return shape, torch.tensor(numbers).reshape(mesh), placements


def seen_by(rank, shape, mesh, placements):
    """Returns one rank's view of a tensor, and the elements that it holds."""
    with as_rank(rank):
        device_mesh = DeviceMesh("cpu", mesh)
        coordinate = device_mesh.get_coordinate()
        held = torch.empty(0, dtype=torch.int64)
        if coordinate is not None:
            held = held_indices(shape, placements, mesh.shape, coordinate)
        whole = torch.empty(shape)
        tensor = DTensor.from_local(
            held, device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return Sharder(rank, range(RANKS)).sharded(tensor, "w"), held


@SLOW_FAMILY
@given(layout=dtensors())
def test_ranks_agree_on_who_holds_a_tensor_and_who_has_the_same_of_it(layout):
    shape, mesh, placements = layout
    seen = [seen_by(rank, shape, mesh, placements) for rank in range(RANKS)]
    holders = set(mesh.flatten().tolist())
    for rank, (own, held) in enumerate(seen):
        assert set(own.holders.ranks) == holders
        assert own.is_held == (rank in holders)
        if rank not in holders:
            assert not own.boxes
            continue
        assert torch.equal(gathered(own.boxes, shape, held.shape), held)
        assert rank in own.replicas.ranks
        for other in own.replicas.ranks:
            assert seen[other][0].boxes == own.boxes
            assert seen[other][0].replicas.ranks == own.replicas.ranks
    assert is_balanced(
        sums([("w", "int64", own)] if rank in holders else [] for rank, (own, _) in enumerate(seen))
    )
    times = torch.zeros(shape, dtype=torch.int64)
    for rank, (own, _) in enumerate(seen):
        wanted = [HeldBox(0, "w", box, 8) for box in own.boxes]
        for piece in share_out(wanted, own.replicas, rank):
            place = zip(piece.box.start, piece.box.shape, strict=True)
            times[tuple(slice(low, low + size) for low, size in place)] += 1
    assert (times == 1).all()


def test_the_order_of_a_mesh_is_part_of_what_ranks_compare():
    rows = [torch.tensor(row) for row in ([0, 1, 2, 3], [3, 2, 1, 0])]
    tokens = {seen_by(0, (8, 2), row, [Shard(0)])[0].token for row in rows}
    assert len(tokens) == 2


def test_partial_sums_are_refused():
    with as_rank(0):
        mesh = DeviceMesh("cpu", list(range(RANKS)))
        tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        with pytest.raises(UnsupportedStateError, match="partial sums"):
            Sharder(0, range(RANKS)).sharded(tensor, "w")


def test_a_tensor_of_ranks_that_do_not_save_is_refused():
    with as_rank(0):
        tensor = distribute_tensor(
            torch.ones(8), DeviceMesh("cpu", [0, 5]), [Shard(0)], src_data_rank=None
        )
        with pytest.raises(UnsupportedStateError, match="rank 5"):
            Sharder(0, [0, 1, 2, 3]).sharded(tensor, "w")


def test_a_tensor_that_is_sharded_in_an_order_of_its_own_is_refused():
    """Also after a tensor of the same mesh and placements, sharded in the usual order."""
    spec = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    if not hasattr(spec, "ShardOrderEntry"):
        pytest.skip("this PyTorch knows no order of shards")
    with as_rank(1, size=4):
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        usual = distribute_tensor(torch.arange(8), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        order = (spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        own_spec = spec.DTensorSpec(
            mesh, usual.placements, tensor_meta=usual._spec.tensor_meta, shard_order=order
        )
        own = DTensor(usual.to_local(), own_spec, requires_grad=False)
        sharder = Sharder(1, range(4))
        assert sharder.sharded(usual, "w").boxes == [Box((2,), (2,), (0,))]
        with pytest.raises(UnsupportedStateError, match="order of its own"):
            sharder.sharded(own, "v")


def test_two_cuts_of_one_dimension_are_refused_where_pytorch_does_not_say_their_order(monkeypatch):
    """Before 2.5, FSDP around tensor parallelism reports wrong placements."""
    monkeypatch.setattr("penstock.tensors.torch_names.SAYS_SHARD_ORDER", False)
    with as_rank(1, size=4):
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        twice = distribute_tensor(torch.arange(8), mesh, [Shard(0), Shard(0)], src_data_rank=None)
        once = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)], src_data_rank=None)
        sharder = Sharder(1, range(4))
        assert sharder.sharded(once, "v").boxes == [Box((0, 2), (2, 2), (0, 0))]
        with pytest.raises(UnsupportedStateError, match=r"^w: .*'torch>=2\.5'"):
            sharder.sharded(twice, "w")


def test_a_tensor_that_is_not_what_its_placements_say_is_not_filled(tmp_path):
    """FSDP over tensor parallelism makes such tensors; memory beyond them is not written."""
    penstock.save(tmp_path / "ckpt", {"w": torch.arange(19 * 8).reshape(19, 8)})
    with as_rank(4, size=6):
        mesh = DeviceMesh("cpu", torch.arange(6).reshape(3, 2))
        memory = torch.zeros(10, 8, dtype=torch.int64)
        tensor = DTensor.from_local(
            memory[:2],
            mesh,
            [_StridedShard(0, split_factor=2), Shard(0)],
            run_check=False,
            shape=torch.Size([19, 8]),
            stride=(8, 1),
        )
        with pytest.raises(StateMismatchError, match="do not say"):
            penstock.load(tmp_path / "ckpt", into={"w": tensor}, rank=4)
    assert not memory.any()


@pytest.mark.parametrize("local_shape", [(3, 2), (6,), (2, 2), (0,)])
def test_a_tensor_that_is_not_what_its_placements_say_is_not_saved(local_shape):
    with as_rank(0, size=2):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = DTensor.from_local(
            torch.zeros(local_shape),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=torch.Size([4, 3]),
            stride=(3, 1),
        )
        with pytest.raises(UnsupportedStateError, match="do not say"):
            flatten_sharded({"w": tensor}, Sharder(0, range(2)), lambda hashes: [])


def test_a_dtensor_whose_name_is_not_its_own_is_refused():
    """Ranks may disagree on the order of two tensors with one name."""
    with as_rank(0, size=2):
        mesh = DeviceMesh("cpu", [0, 1])
        one, other = (
            DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], run_check=False) for _ in range(2)
        )
        for state in ({"a.b": one, "a": {"b": other}}, {"a.b": torch.ones(2), "a": {"b": one}}):
            with pytest.raises(UnsupportedStateError, match=r"a\.b"):
                flatten_sharded(
                    state, Sharder(0, range(2)), lambda hashes: [Members.of([0])] * len(hashes)
                )


@pytest.mark.parametrize("group", [[0, 1, 2, 3], [3, 0, 2, 1], [9, 0, 3, 2, 1]])
def test_ranks_of_a_mesh_are_numbered_as_in_the_group(group):
    with as_rank(0, size=10):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        tensor = DTensor.from_local(
            torch.zeros(2, 3), mesh, [Replicate(), Shard(0)], run_check=False
        )
        found = Sharder(group.index(0), group).sharded(tensor, "w")
        assert found.holders.ranks == tuple(sorted(map(group.index, range(4))))
        assert found.replicas.ranks == tuple(sorted(map(group.index, (0, 2))))
        assert found.replicas.token == Members.of(found.replicas.ranks).token


@pytest.mark.parametrize("group", [[0, 1], [0, 2], [4, 0, 1], [0]])
def test_a_mesh_with_a_rank_outside_of_the_group_is_refused(group):
    with as_rank(0, size=5):
        mesh = DeviceMesh("cpu", [0, 1, 3])
        tensor = DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)
        with pytest.raises(UnsupportedStateError, match=r"w: its mesh has rank [13], which is not"):
            Sharder(group.index(0), group).sharded(tensor, "w")
