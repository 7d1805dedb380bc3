"""Recovered generations: their files are adopted, copied, or refused."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

import penstock
from offload.optim.training_of import (
    MEMORY_BYTES,
    SMALL,
    assert_equal,
    assert_equal_states,
    in_memory,
    parameters,
    set_gradients,
    stepped,
)
from penstock import offload
from penstock.errors import CorruptCheckpointError, StateMismatchError
from penstock.io.digested_file import DigestedFile
from penstock.offload.optim import adopt_links, files, generation, state

if TYPE_CHECKING:
    from pathlib import Path


def inodes(directory: Path) -> set[int]:
    """Returns the inodes of the generation's files."""
    shards = (directory / "rank-00000" / "generation").glob("shard-*")
    return {shard.stat().st_ino for shard in shards}


def ended(directory: Path, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the parameters and moments of a run that has ended."""
    ours, one = stepped(directory, **options)
    state = one.state_dict()["state"]
    moments = {
        number: {name: in_memory(value) for name, value in some.items()}
        for number, some in state.items()
    }
    del state
    one.close()
    return ours, {"state": moments}


def begun(directory: Path, ours: list[Any], **options: Any) -> tuple[list[Any], Any]:
    again = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    return again, offload.AdamW(again, directory=directory, memory_bytes=MEMORY_BYTES, **options)


def test_files_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adopt_links, "_READ_BYTES", 1 << 20)
    ours, state = ended(tmp_path)
    before = inodes(tmp_path)
    again, one = begun(tmp_path, ours)
    assert one.recover()
    # The same files: none of them was rewritten.
    assert inodes(tmp_path) == before
    assert_equal_states(state, one.state_dict())
    kept = one.state_dict()
    theirs, other = stepped(tmp_path / "other")
    for step in range(2, 6):
        set_gradients(step, again, theirs)
        one.step()
        other.step()
    assert not inodes(tmp_path) & before
    assert_equal(theirs, again)
    assert_equal_states(other.state_dict(), one.state_dict())
    # References to the recovered step's state stay valid.
    assert_equal_states(state, kept)
    names = {path.name for path in (tmp_path / "rank-00000").glob("*.safetensors")}
    del kept
    set_gradients(6, again)
    one.step()
    assert len(names) == 6
    assert penstock.verify(tmp_path / "rank-00000" / "generation").ok
    one.close()
    other.close()


@pytest.mark.parametrize("kind", ["groups", "no links"])
def test_what_cannot_be_taken_over_is_copied(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, state = ended(tmp_path)
    before = inodes(tmp_path)
    if kind == "no links":
        again, one = begun(tmp_path, ours)
        monkeypatch.setattr(files.StateFiles, "link", lambda *_: None)
    else:
        # Imported later, a parameter is in files of its own.
        again = [torch.nn.Parameter(one.detach().clone()) for one in ours]
        one = offload.AdamW(again[:2], directory=tmp_path, memory_bytes=MEMORY_BYTES)
        one.add_param_group({"params": again[2:]})
    assert one.recover()
    assert not inodes(tmp_path) & before
    assert_equal_states(state, one.state_dict())
    one.close()


@pytest.mark.parametrize("place", [100, 4096 + 5000, -1])
def test_damage_is_found(tmp_path: Path, place: int) -> None:
    ours, _ = ended(tmp_path)
    shard = max((tmp_path / "rank-00000" / "generation").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[place] ^= 1
    shard.write_bytes(data)
    _, one = begun(tmp_path, ours)
    with pytest.raises(CorruptCheckpointError) as raised:
        one.recover()
    assert raised.value.file == shard.name
    assert one.state_dict()["state"] == {}
    one.close()


def test_another_number_of_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "own_size", lambda: 2)
    ours, _ = ended(tmp_path)
    monkeypatch.undo()
    _, one = begun(tmp_path, ours)
    with pytest.raises(StateMismatchError, match="one of 2 ranks, and this is one of 1"):
        one.recover()
    assert one.state_dict()["state"] == {}
    monkeypatch.setattr(generation, "own_size", lambda: 2)
    assert one.recover()
    one.close()


def test_a_generation_with_more_moments_is_refused(tmp_path: Path) -> None:
    ours, _ = ended(tmp_path, amsgrad=True)
    _, one = begun(tmp_path, ours)
    with pytest.raises(StateMismatchError, match="max_exp_avg_sq"):
        one.recover()
    one.close()
    _, one = begun(tmp_path, ours, amsgrad=True)
    assert one.recover()
    one.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masters_come_back_a_piece_at_a_time(
    tmp_path: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = (*SMALL, (0, 3), ())
    ours = parameters(dtype, shapes)
    one = offload.AdamW(ours, directory=tmp_path, memory_bytes=MEMORY_BYTES, masters=True)
    for step in range(2):
        set_gradients(step, ours)
        one.step()
    one.close()
    monkeypatch.setattr(state, "PIECE_BYTES", 64 << 10)
    sizes = []
    read = DigestedFile.read

    def noted(file: Any, memory: Any, offset: int) -> None:
        sizes.append(memory.nbytes)
        read(file, memory, offset)

    monkeypatch.setattr(DigestedFile, "read", noted)
    again = [torch.nn.Parameter(torch.zeros_like(one)) for one in ours]
    one = offload.AdamW(again, directory=tmp_path, memory_bytes=MEMORY_BYTES, masters=True)
    assert one.recover()
    assert_equal(ours, again)
    assert max(sizes) == 64 << 10
    assert sum(sizes) == sum(4 * one.numel() for one in ours)
    one.close()


@pytest.mark.parametrize("has", [False, True])
def test_a_state_with_other_moments_is_refused_when_it_is_loaded(tmp_path: Path, has: bool) -> None:
    _, given = stepped(tmp_path / "given", amsgrad=not has)
    ours, one = stepped(tmp_path / "own", amsgrad=has)
    before = one.state_dict()
    with pytest.raises(StateMismatchError, match=r"max_exp_avg_sq.*\(amsgrad\)"):
        one.load_state_dict(given.state_dict())
    assert one.param_groups[0]["amsgrad"] is has
    assert_equal_states(before, one.state_dict())
    set_gradients(2, ours)
    one.step()
    one.close()
    given.close()


def test_a_state_without_momentum_is_refused(tmp_path: Path) -> None:
    ours = parameters(shapes=SMALL)
    one = offload.SGD(ours, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    given = torch.optim.SGD(ours, momentum=0).state_dict()
    with pytest.raises(StateMismatchError, match="group 0 of the state: momentum=0"):
        one.load_state_dict(given)
    set_gradients(0, ours)
    one.step()
    one.close()
    assert os.path.exists(tmp_path / "rank-00000" / "generation")
