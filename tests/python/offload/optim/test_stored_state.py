"""States of optimizers in files: exported, kept, copied to others, imported."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

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
from penstock.errors import StateMismatchError, StorageError, UnsupportedStateError
from penstock.tensors.file_tensor import FileTensor


def names(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory / "rank-00000") if name.endswith(".safetensors")]


def test_a_state_stays_that_of_its_step(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path)
    theirs, other = stepped(tmp_path / "other")
    kept = optimizer.state_dict()
    for step in range(2, 6):
        set_gradients(step, ours)
        optimizer.step()
    assert_equal_states(other.state_dict(), kept)
    assert kept["state"][0]["step"] == 2
    optimizer.close()
    # References keep it valid after the optimizer is gone.
    del optimizer
    gc.collect()
    assert_equal_states(other.state_dict(), kept)
    other.close()
    del theirs


def test_files_that_nobody_holds_are_written_again(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path, steps=3)
    before = set(names(tmp_path))
    assert len(before) == 4, "two moments, of this generation and for the next one"
    for step in range(3, 8):
        set_gradients(step, ours)
        optimizer.step()
    assert set(names(tmp_path)) == before
    kept = optimizer.state_dict()
    for step in range(8, 11):
        set_gradients(step, ours)
        optimizer.step()
    assert len(names(tmp_path)) == 6
    del kept
    set_gradients(11, ours)
    optimizer.step()
    assert len(names(tmp_path)) <= 6
    optimizer.close()


def test_a_parameter_without_gradient_keeps_its_state(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path)
    before = in_memory(optimizer.state_dict()["state"][1]["exp_avg"])
    set_gradients(2, ours, without=lambda at: at == 1)
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert torch.equal(in_memory(state[1]["exp_avg"]), before)
    assert (state[0]["step"], state[1]["step"]) == (3, 2)
    optimizer.close()


def test_a_step_without_gradients_is_none(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path, steps=0)
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    assert not names(tmp_path)
    del ours
    optimizer.close()


@pytest.mark.parametrize("kind", ["files", "memory", "pytorch's"])
def test_a_state_is_taken_over(tmp_path: Path, kind: str) -> None:
    ours, optimizer = stepped(tmp_path / "one")
    state = optimizer.state_dict()
    if kind == "memory":
        state["state"] = {
            number: {name: in_memory(value) for name, value in moments.items()}
            for number, moments in state["state"].items()
        }
    if kind == "pytorch's":
        theirs = parameters(shapes=SMALL)
        other = torch.optim.AdamW(theirs, fused=True)
        for step in range(2):
            set_gradients(step, theirs)
            other.step()
        state = other.state_dict()
    again = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    second = offload.AdamW(again, directory=tmp_path / "two", memory_bytes=MEMORY_BYTES)
    second.load_state_dict(state)
    for step in range(2, 4):
        set_gradients(step, ours, again)
        optimizer.step()
        second.step()
    assert_equal(ours, again)
    assert_equal_states(optimizer.state_dict(), second.state_dict())
    optimizer.close()
    second.close()


def test_pytorch_takes_a_state_over(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    # The saved state consists of plain tensors, which load without code.
    state = torch.load(buffer, weights_only=True)
    theirs = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    other = torch.optim.AdamW(theirs, fused=True)
    other.load_state_dict(state)
    set_gradients(2, ours, theirs)
    optimizer.step()
    other.step()
    assert_equal(ours, theirs)
    optimizer.close()


def test_a_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    _, optimizer = stepped(tmp_path)
    before = optimizer.state_dict()
    whole = before["state"][0]
    less = {key: value for key, value in whole.items() if key != "exp_avg_sq"}
    with pytest.raises(StateMismatchError, match="has no 'exp_avg_sq'"):
        optimizer.load_state_dict({**before, "state": {0: less}})
    other = {**whole, "exp_avg": torch.zeros(3)}
    with pytest.raises(StateMismatchError, match=r"has shape \[3\]"):
        optimizer.load_state_dict({**before, "state": {0: other}})
    with pytest.raises(StateMismatchError, match="has parameter 7, the optimizer 3"):
        optimizer.load_state_dict({**before, "state": {7: whole}})
    assert_equal_states(before, optimizer.state_dict())
    optimizer.close()


def test_masters_are_made_where_a_state_has_none(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path / "one")
    again = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    second = offload.AdamW(again, directory=tmp_path / "two", masters=True)
    second.load_state_dict(optimizer.state_dict())
    set_gradients(2, ours, again)
    optimizer.step()
    second.step()
    assert_equal(ours, again)
    optimizer.close()
    second.close()


def test_one_directory_is_of_one_optimizer(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path)
    with pytest.raises(StorageError, match="another optimizer of this process"):
        offload.AdamW(ours, directory=tmp_path)
    if not (child := os.fork()):
        code = 1
        try:
            offload.AdamW(ours, directory=tmp_path)
        except StorageError as error:
            code = 0 if "in use by" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    set_gradients(2, ours)
    optimizer.step()
    optimizer.close()
    offload.AdamW(ours, directory=tmp_path).close()


def test_what_it_cannot_do_it_says(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="not contiguous"):
        offload.AdamW([torch.nn.Parameter(torch.zeros(3, 4).t())], directory=tmp_path)
    with pytest.raises(UnsupportedStateError, match="on meta"):
        offload.AdamW([torch.nn.Parameter(torch.zeros(3, device="meta"))], directory=tmp_path)
    with pytest.raises(ValueError, match=r"use torch\.optim\.SGD"):
        offload.SGD([torch.nn.Parameter(torch.zeros(3))], momentum=0, directory=tmp_path)
    twice = [torch.nn.Parameter(torch.zeros(3))] * 2
    with (
        pytest.warns(UserWarning, match="duplicate parameters"),
        pytest.raises(ValueError, match=r"parameter 1 \(group 0\) is there twice"),
    ):
        offload.AdamW(twice, directory=tmp_path)
    with pytest.raises(ValueError, match="memory_bytes=-1"):
        offload.AdamW([torch.nn.Parameter(torch.zeros(3))], directory=tmp_path, memory_bytes=-1)
    ours, optimizer = stepped(tmp_path)
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedStateError, match="not copied"):
            copying(optimizer)
    ours[0].data = ours[0].data.to(torch.bfloat16)
    ours[0].grad = None
    set_gradients(2, ours)
    with pytest.raises(StateMismatchError, match="parameter 0 or its group has changed"):
        optimizer.step()
    optimizer.close()


def test_hooks_see_and_change_whole_states(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path)
    seen = []

    def halved(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        state = dict(given["state"])
        state[0] = {**state[0], "exp_avg": in_memory(state[0]["exp_avg"]) / 2}
        return {**given, "state": state}

    def note(_: Any) -> None:
        seen.append(in_memory(optimizer.state_dict()["state"][0]["exp_avg"]))

    before = in_memory(optimizer.state_dict()["state"][0]["exp_avg"])
    kept = optimizer.register_state_dict_post_hook(
        lambda _, packed: {"state": {f"n{key}": one for key, one in packed["state"].items()}}
    )
    assert optimizer.state_dict()["state"]["n0"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    kept.remove()
    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.register_load_state_dict_post_hook(note)
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(seen[0], before / 2)
    del ours
    optimizer.close()


def test_a_state_calls_parameters_what_it_likes(tmp_path: Path) -> None:
    shapes = ((8, 8), (8, 8))
    theirs, ours = parameters(shapes=shapes), parameters(shapes=shapes)
    one = torch.optim.AdamW(theirs, fused=True)
    other = offload.AdamW(ours, directory=tmp_path / "one", memory_bytes=MEMORY_BYTES)
    set_gradients(0, theirs, ours)
    one.step()
    other.step()
    # As in PyTorch: the position in the groups identifies a parameter.
    state = one.state_dict()
    state["param_groups"][0]["params"] = [1, 0]
    penstock.save(tmp_path / "checkpoint", state)
    for kind in ("memory", "files"):
        if kind == "files":
            state = penstock.load(tmp_path / "checkpoint", into=other.state_dict())
            state = getattr(state, "state", state)
            state["param_groups"][0]["params"] = [1, 0]
        other.load_state_dict(state)
        one.load_state_dict(torch.load(io.BytesIO(_pickled(state)), weights_only=True))
        assert_equal_states(one.state_dict(), other.state_dict())
    other.close()


def _pickled(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_a_state_that_is_refused_leaves_counts_and_options(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path)
    before = optimizer.state_dict()
    for given in (
        {**before, "state": {0: {"step": 7.0, "exp_avg": torch.zeros(64, 64)}}},
        {**before, "param_groups": before["param_groups"] * 2},
    ):
        given["param_groups"][0]["lr"] = 0.5
        with pytest.raises((StateMismatchError, ValueError)):
            optimizer.load_state_dict(given)
        assert optimizer.param_groups[0]["lr"] == 1e-3
        assert_equal_states(before, optimizer.state_dict())
    del ours
    optimizer.close()


def test_the_process_may_go_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ours, optimizer = stepped(Path("state"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    set_gradients(2, ours)
    optimizer.step()
    penstock.save("checkpoint", optimizer.state_dict())
    assert penstock.verify("checkpoint").ok
    assert os.listdir(tmp_path / "elsewhere") == ["checkpoint"]
    optimizer.close()


def test_links_have_to_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Like a file system without link counts.
    monkeypatch.setattr(os, "link", shutil.copyfile)
    with pytest.raises(StorageError, match="does not tell how many hard links"):
        stepped(tmp_path)
    monkeypatch.undo()
    _, optimizer = stepped(tmp_path)
    optimizer.close()


def test_a_closed_optimizer_says_so(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path)
    state = optimizer.state_dict()
    optimizer.close()
    optimizer.close()
    again = offload.AdamW(ours, directory=tmp_path, memory_bytes=MEMORY_BYTES)
    before = set(names(tmp_path))
    for call in (
        optimizer.step,
        optimizer.state_dict,
        optimizer.recover,
        lambda: optimizer.load_state_dict(state),
        lambda: optimizer.add_param_group({"params": parameters(shapes=((3,),))}),
    ):
        with pytest.raises(penstock.PenstockError, match="is closed: make another one"):
            call()
    assert set(names(tmp_path)) == before
    again.close()


def test_a_fork_leaves_the_files_of_its_parent(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path)
    set_gradients(2, ours)
    before = optimizer.state_dict()
    if not (child := os.fork()):
        code = 1
        try:
            optimizer.step()
        except penstock.PenstockError as error:
            code = 0 if "forked from" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    optimizer.step()
    optimizer.load_state_dict(before)
    assert_equal_states(before, optimizer.state_dict())
    optimizer.close()


def test_the_least_memory_works_and_a_byte_less_does_not(tmp_path: Path) -> None:
    ours = parameters(shapes=SMALL)
    with pytest.raises(ValueError, match="is the least that works") as raised:
        offload.AdamW(ours, directory=tmp_path, memory_bytes=1)
    least = int(str(raised.value).split(": ")[1].split()[0])
    with pytest.raises(ValueError, match=f"{least} is the least"):
        offload.AdamW(ours, directory=tmp_path, memory_bytes=least - 1)
    theirs = parameters(shapes=SMALL)
    optimizer = offload.AdamW(ours, directory=tmp_path, memory_bytes=least)
    other = torch.optim.AdamW(theirs, fused=True)
    for step in range(2):
        set_gradients(step, ours, theirs)
        optimizer.step()
        other.step()
    assert_equal(ours, theirs)
    optimizer.close()


def test_a_state_can_be_read_where_it_lies(tmp_path: Path) -> None:
    _, optimizer = stepped(tmp_path)
    moment = optimizer.state_dict()["state"][2]["exp_avg"]
    assert isinstance(moment, FileTensor)
    from safetensors import safe_open

    with safe_open(moment.file.path, "pt") as file:
        assert torch.equal(file.get_tensor(moment.label), moment.read())
    optimizer.close()
