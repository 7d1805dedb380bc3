"""Rank saves and open checkpoints, as `penstock.checkpoint` offers them to plug-ins."""

import json
import os

import numpy as np
import pytest

import penstock
from penstock.checkpoint.saving.groups import INDEX
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    RankError,
)
from penstock.plugin import (
    BoxRead,
    Groups,
    OpenCheckpoint,
    PartVote,
    RankAttempt,
    of_array,
    to_source,
)

OPTIONS = penstock.Options().to_native()
TREE = {
    "rows": {"$": "ndarray", "g": "rows", "dtype": "int64", "shape": [6, 5]},
    "step": 7,
    "few": {"$": "ndarray", "i": 0},
}


def rows():
    return np.arange(30).reshape(6, 5)


def sources(number):
    """Returns the tensors that a rank writes: half of the rows; on the first rank one more."""
    half = np.ascontiguousarray(rows()[3 * number : 3 * number + 3])
    box = to_source(of_array(half, "half"), "half", ("rows", (6, 5), (3 * number, 0)))
    few = np.array([1.5, 2.5])
    return [box] if number else [to_source(of_array(few, "few"), "few"), box]


def saved(path, *, numbers=(0, 1)):
    """Saves a checkpoint of two ranks that exchange ids and votes as a framework would."""
    coordinator = RankAttempt.begin(str(path), overwrite=False)
    try:
        votes = {}
        for number in numbers[1:]:
            joined = RankAttempt.join(str(path), coordinator.id, number)
            votes[number] = joined.write(number, sources(number), OPTIONS)
        coordinator.write_shards(numbers[0], sources(numbers[0]), OPTIONS)
        votes[numbers[0]] = coordinator.write_part(json.dumps(TREE))
        assert not (path / "manifest.json").exists()
        coordinator.commit(votes, metadata='{"by":"hand"}', overwrite=False, step=7)
    finally:
        coordinator.abandon()


def test_what_ranks_write_in_an_attempt_is_a_checkpoint_like_any_other(tmp_path):
    path = tmp_path / "ckpt"
    saved(path)
    state = penstock.load(path)
    assert np.array_equal(state["rows"], rows())
    assert (state["few"].tolist(), state["step"]) == ([1.5, 2.5], 7)
    found = penstock.inspect(path)
    assert (found.step, found.world_size, found.metadata) == (7, 2, {"by": "hand"})
    assert penstock.verify(path).ok
    with pytest.raises(CheckpointExistsError):
        saved(path)


def test_an_attempt_that_is_abandoned_leaves_nothing(tmp_path):
    path = tmp_path / "ckpt"
    attempt = RankAttempt.begin(str(path), overwrite=False)
    attempt.write_shards(0, sources(0), OPTIONS)
    attempt.abandon()
    assert not path.exists() or os.listdir(path) == []
    with pytest.raises(CheckpointNotFoundError):
        penstock.load(path)


def test_a_rank_that_sees_another_directory_is_named_and_nothing_is_committed(tmp_path):
    path = tmp_path / "ckpt"
    attempt = RankAttempt.begin(str(path), overwrite=False)
    with pytest.raises(RankError, match="what rank 1 writes to") as error:
        RankAttempt.join(str(tmp_path / "elsewhere"), attempt.id, 1)
    assert error.value.rank == 1
    attempt.write_shards(0, sources(0), OPTIONS)
    votes = {0: attempt.write_part(json.dumps(TREE)), 1: PartVote("part-00001.0.json", 9, 9)}
    with pytest.raises(RankError, match="what rank 1 writes") as error:
        attempt.commit(votes, metadata="{}", overwrite=False)
    assert error.value.rank == 1
    attempt.abandon()
    assert not (path / "manifest.json").exists()


def test_ranks_that_talk_for_themselves_have_groups_and_small_files(tmp_path):
    path = tmp_path / "ckpt"
    groups = Groups.check({"model": ""})

    def sources(number):
        half = np.full((3, 5), number)
        box = to_source(of_array(half, "a"), "a", ("model.a", (6, 5), (3 * number, 0)))
        whole = to_source(of_array(half, "b"), "b", (f"model.b{number}", (3, 5), (0, 0)))
        return {"whole": [whole], "pieces": [whole, box]}

    for what in ("whole", "pieces"):
        coordinator = RankAttempt.begin(
            str(path), overwrite=True, groups=groups, files=[("config.json", b"{}")]
        )
        joined = RankAttempt.join(str(path), coordinator.id, 1, groups=groups)
        votes = {1: joined.write(1, sources(1)[what], OPTIONS)}
        coordinator.write_shards(0, sources(0)[what], OPTIONS)
        votes[0] = coordinator.write_part("{}")
        coordinator.commit(votes, metadata="{}", overwrite=True)
        assert (path / "config.json").read_bytes() == b"{}"
        assert (path / INDEX).exists() == (what == "whole")
        kinds = [one.kind for one in coordinator.written["fallbacks"]]
        assert kinds.count("unindexed") == (what == "pieces")
    with pytest.raises(ValueError, match="leave it out"):
        RankAttempt.begin(str(path), overwrite=True, groups=groups, files=[(INDEX, b"{}")])


def test_an_open_checkpoint_reads_boxes_and_values_as_they_are_asked_for(tmp_path):
    saved(tmp_path / "ckpt")
    checkpoint = OpenCheckpoint(str(tmp_path / "ckpt"))
    assert checkpoint.metadata() == {"by": "hand"}
    checkpoint.view_as(1)
    assert set(checkpoint.root) == {"rows", "step", "few"}
    assert sorted(checkpoint.boxes()) == [("rows", (0, 0), (3, 5)), ("rows", (3, 0), (3, 5))]
    tensor = checkpoint.tensor(checkpoint.root["rows"])
    assert (tensor.of, tensor.dtype, tensor.shape) == ("rows", "int64", (6, 5))
    # Across the border between the two ranks' boxes, and an empty read.
    box, none = np.zeros((2, 3), np.int64), np.zeros((0, 5), np.int64)
    reads = [
        BoxRead(tensor, (2, 1), of_array(box, "box")),
        BoxRead(tensor, (0, 0), of_array(none, "none")),
    ]
    checkpoint.read(reads, OPTIONS)
    assert np.array_equal(box, rows()[2:4, 1:4])
    nodes = [checkpoint.root["few"], checkpoint.root["step"], checkpoint.root["rows"]]
    few, step, whole = checkpoint.values(nodes, OPTIONS)
    assert (few.tolist(), step) == ([1.5, 2.5], 7)
    assert np.array_equal(whole, rows())
    with checkpoint.reading(), pytest.raises(ValueError, match="tensor 9"):
        checkpoint.tensor({"$": "ndarray", "i": 9})
    checkpoint.release()


def test_an_open_checkpoint_has_damage_and_nonsense_told_by_its_path(tmp_path):
    path = tmp_path / "ckpt"
    with pytest.raises(CheckpointNotFoundError, match="ckpt"):
        OpenCheckpoint(str(path))
    saved(path)
    (shard,) = path.glob("shard-00000*")
    with shard.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    checkpoint = OpenCheckpoint(str(path))
    checkpoint.view_as(0)
    with pytest.raises(CorruptCheckpointError, match="ckpt"):
        list(checkpoint.values([checkpoint.root], OPTIONS))
    with pytest.raises(CorruptCheckpointError, match="ckpt"), checkpoint.reading():
        checkpoint.tensor({"$": "ndarray", "i": 9})
    checkpoint.release()
