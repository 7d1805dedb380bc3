"""DCP's metadata is input: it gives each element and each value one place, or is refused."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest

import penstock
from penstock.checkpoint.layout.boxes import check_tiled
from penstock.errors import CorruptCheckpointError, StorageError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def changed(tmp_path):
    """Saves a state by DCP, and returns a function that changes its metadata."""

    def change(state, how):
        path = tmp_path / "d"
        dcp.save(state, checkpoint_id=path, no_dist=True)
        metadata = pickle.loads((path / ".metadata").read_bytes())
        how(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        return path

    return change


def assert_damaged(path, match):
    with pytest.raises(CorruptCheckpointError, match=match):
        penstock.convert(path, path.parent / "out")
    assert not (path.parent / "out").exists()


def whole():
    return {"w": torch.arange(12.0).view(3, 4)}


def test_a_piece_that_is_noted_twice_does_not_stand_for_one_that_is_missing(changed):
    def how(metadata):
        entry = metadata.state_dict_metadata["w"]
        entry.chunks.append(copy.deepcopy(entry.chunks[0]))
        entry.size = torch.Size((6, 4))

    assert_damaged(changed(whole(), how), r"w is damaged: only 12 of its 24 elements")


def test_a_piece_that_is_noted_twice_is_taken_once(changed, tmp_path):
    def how(metadata):
        entry = metadata.state_dict_metadata["w"]
        entry.chunks.append(copy.deepcopy(entry.chunks[0]))

    penstock.convert(changed(whole(), how), tmp_path / "out")
    assert torch.equal(penstock.load(tmp_path / "out")["w"], whole()["w"])


def overlapping(metadata):
    """Makes two pieces overlap, and leaves a hole of the same size."""
    entry = metadata.state_dict_metadata["w"]
    (first,) = entry.chunks
    second = copy.deepcopy(first)
    second.offsets, second.sizes = torch.Size((2, 0)), torch.Size((3, 4))
    entry.chunks.append(second)
    entry.size = torch.Size((6, 4))
    (index,) = metadata.storage_data
    place = metadata.storage_data[index]
    index = copy.deepcopy(index)
    object.__setattr__(index, "offset", second.offsets)
    metadata.storage_data[index] = place


def test_pieces_that_overlap_are_refused_by_convert_and_by_dcp(changed):
    path = changed(whole(), overlapping)
    assert_damaged(path, r"w is damaged: its blocks at \[0, 0\] and \[2, 0\] overlap")
    from penstock.integrations.dcp.defaults import reader_of

    with pytest.raises(dcp.api.CheckpointException, match="overlap"):
        dcp.load({"w": torch.zeros(6, 4)}, storage_reader=reader_of(path), no_dist=True)


def test_a_hole_of_the_size_of_an_overlap_is_found_in_any_order():
    tiles = [((row, column), (2, 2)) for row in (0, 2) for column in (0, 2)]
    for blocks in itertools.permutations(tiles):
        check_tiled((4, 4), blocks, is_whole=True)
        wrong = [((1, 1), (2, 2)) if block == ((2, 2), (2, 2)) else block for block in blocks]
        with pytest.raises(ValueError, match="overlap"):
            check_tiled((4, 4), wrong, is_whole=True)
    check_tiled((), [((), ())], is_whole=True)
    check_tiled((0, 4), [], is_whole=True)
    check_tiled((4,), [((0,), (0,)), ((0,), (4,)), ((2,), (0,))], is_whole=True)


@pytest.mark.parametrize(
    ("block", "why"),
    [(((-1,), (2,)), "beyond"), (((3,), (2,)), "beyond"), (((0, 0), (2, 2)), "dimensions")],
)
def test_a_block_beside_its_tensor_is_refused(block, why):
    with pytest.raises(ValueError, match=why):
        check_tiled((4,), [((0,), (4,)), block], is_whole=True)


PATHS = {
    "the place of another": {"m.w": ("m", "b")},
    "through a value": {"m.w": ("step", "x")},
    "through a value that comes later": {"step": ("m",)},
    "a place before a list": {"m.w": ("l", -1)},
    "none": {"m.w": ()},
    "a key of no kind": {"m.w": (["x"],)},
    "a truth": {"m.w": ("l", True)},
    "a list without end": {"m.w": ("l", 10**8)},
    "a number beyond all": {"m.w": ("l", 10**30)},
    "a list and a dict": {"m.w": ("l", "x")},
    "a list of the state": {"m.w": (0, "x")},
    "deeper than states are": {"m.w": ("m",) * 100_000},
    "no sequence": {"m.w": 5},
}


@pytest.mark.parametrize("paths", PATHS.values(), ids=PATHS)
def test_paths_give_each_value_a_place_of_its_own(changed, paths):
    state = {"m": {"w": torch.ones(2), "b": torch.zeros(2)}, "step": 3, "l": [torch.ones(1)] * 2}
    path = changed(state, lambda metadata: metadata.planner_data.update(paths))
    assert_damaged(path, r"\.metadata is cut or damaged")


def test_places_that_empty_containers_had_are_none(changed, tmp_path):
    path = changed({"l": [{}, torch.ones(1), []]}, lambda metadata: None)
    penstock.convert(path, tmp_path / "out")
    found = penstock.load(tmp_path / "out")["l"]
    assert found[0] is None
    assert torch.equal(found[1], torch.ones(1))


def place_of(metadata):
    (index,) = metadata.storage_data
    return metadata.storage_data[index]


CHANGES = {
    "an item before its file": lambda one: vars(place_of(one)).update(offset=-5),
    "an item of less than nothing": lambda one: vars(place_of(one)).update(length=-5),
    "an item beyond all files": lambda one: vars(place_of(one)).update(offset=10**30),
    "an item at a fraction": lambda one: vars(place_of(one)).update(offset=0.5),
    "a file without a name": lambda one: vars(place_of(one)).update(relative_path=None),
    "a name that no file has": lambda one: vars(place_of(one)).update(relative_path="a\0b"),
    "a type that is none": lambda one: vars(one.state_dict_metadata["w"].properties).update(
        dtype="f4"
    ),
    "a size that is none": lambda one: vars(one.state_dict_metadata["w"]).update(size=("3", 4)),
    "a size below nothing": lambda one: vars(one.state_dict_metadata["w"]).update(size=(-3, -4)),
    "a tensor without a name": lambda one: one.state_dict_metadata.update({5: 6}),
}


@pytest.mark.parametrize("how", CHANGES.values(), ids=CHANGES)
def test_numbers_and_names_that_mean_nothing_are_damage(changed, how):
    assert_damaged(changed(whole(), how), r"\.metadata is cut or damaged")


def test_dcp_loads_no_item_that_begins_before_its_file(changed):
    from penstock.integrations.dcp.defaults import reader_of

    path = changed(whole(), lambda one: vars(place_of(one)).update(offset=-5))
    with pytest.raises(dcp.api.CheckpointException, match=r"\.metadata is cut or damaged"):
        dcp.load(whole(), storage_reader=reader_of(path), no_dist=True)


def test_a_tensor_that_memory_does_not_hold_is_named(changed):
    def how(metadata):
        entry = metadata.state_dict_metadata["w"]
        rows = 1 << 55
        entry.size = torch.Size((rows, 4))
        entry.chunks[0].sizes = torch.Size((3, 4))
        rest = copy.deepcopy(entry.chunks[0])
        rest.offsets, rest.sizes = torch.Size((3, 0)), torch.Size((rows - 3, 4))
        entry.chunks.append(rest)

    path = changed(whole(), how)
    with pytest.raises(StorageError, match=r"\(w\): there is no memory for a tensor"):
        penstock.convert(path, path.parent / "out")
