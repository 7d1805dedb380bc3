"""`penstock.integrations.dcp`: PyTorch's Distributed Checkpoint on Penstock's storage."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import sys
import time
import warnings
from collections import OrderedDict
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import forks
import penstock
from compare import assert_same
from conftest import tell
from penstock.errors import CheckpointExistsError, CorruptCheckpointError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
if not torch.distributed.is_gloo_available():
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

import dcp_worker  # noqa: E402
from held_files import Held  # noqa: E402
from penstock.integrations.dcp import StorageReader, StorageWriter, opened  # noqa: E402
from ranks import Job, environments_of  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:Casting complex values"),
]

LAUNCH_SECONDS_MAX = 240
INDEX = "model.safetensors.index.json"


def together(ranks, *commands):
    """Runs commands of the worker, one after the other, on forked ranks."""
    with closing(Job(ranks)) as job:
        for command in commands:
            name, *arguments = command.split(":")
            job.call(dcp_worker.COMMANDS[name], *arguments)


def launch(ranks, *commands):
    """Runs commands on ranks in new interpreters, which may have children; returns the output."""
    processes = [
        forks.RankPopen(
            [dcp_worker.__file__, *commands],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments_of(ranks)
    ]
    try:
        said = [process.communicate(timeout=LAUNCH_SECONDS_MAX)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return said if any(process.returncode for process in processes) else None


def save(state, path, **arguments):
    planner = arguments.pop("planner", None)
    writer = StorageWriter(path, **arguments)
    return dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def load(state, path, planner=None):
    reader = StorageReader(path)
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def blank(state):
    """Returns the same structure with blank values."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, 0 if state.dtype == torch.bool else 1)
    if isinstance(state, dict):
        return type(state)((key, blank(value)) for key, value in state.items())
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None


def make_state():
    weight = torch.randn(5, 7)
    return {
        "model": OrderedDict(w=weight, wt=weight.t(), half=torch.randn(3).to(torch.bfloat16)),
        "optim": {
            "state": {0: {"step": torch.tensor(3.0), "exp": torch.randn(5, 7)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0]}],
        },
        "empty": torch.zeros(0, 4),
        "mask": torch.tensor([True, False]),
        "complex": torch.randn(4, dtype=torch.complex64).conj(),
        "mixed": [torch.ones(2), 7, {"x": "y"}],
        "losses": [0.5, float("nan"), 2],
        "array": np.arange(6).reshape(2, 3).T,
        "bytes": bytes(range(256)) * 64,
        "big": 1 << 70,
        "none": None,
        "dtype": torch.float16,
        "text": "ü",
    }


def flatten_keys(state):
    """Returns a state as DCP restores it: text keys, no OrderedDict, no ties."""
    if isinstance(state, dict):
        return {str(key): flatten_keys(value) for key, value in state.items()}
    if isinstance(state, torch.Tensor):
        return state.clone().resolve_conj()
    return [flatten_keys(value) for value in state] if isinstance(state, list) else state


class TestOneProcess:
    def test_what_was_saved_comes_back(self, tmp_path):
        state = make_state()
        save(state, tmp_path / "a")
        found = load(blank(state), tmp_path / "a")
        assert found["model"].keys() == state["model"].keys()
        assert_same(flatten_keys(found), flatten_keys(state))

    def test_it_is_a_checkpoint_like_any_other(self, tmp_path):
        state = make_state()
        save(state, tmp_path / "a")
        assert_same(penstock.load(tmp_path / "a"), flatten_keys(state))
        assert penstock.verify(tmp_path / "a").ok
        info = penstock.inspect(tmp_path / "a")
        assert "model.w" in {tensor.name for tensor in info.tensors}
        assert info.values()["text"] == "ü"
        for command in ("inspect", "verify"):
            run = [sys.executable, "-m", "penstock", command, str(tmp_path / "a")]
            subprocess.run(run, check=True, capture_output=True)
        assert not list(tmp_path.glob("a/*.distcp"))

    def test_loads_without_knowing_the_state(self, tmp_path):
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

        state = make_state()
        save(state, tmp_path / "a")
        everything = _load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "a"))
        assert_same(flatten_keys(everything), flatten_keys(state))
        some = _load_state_dict_from_keys("optim", storage_reader=StorageReader(tmp_path / "a"))
        assert list(some) == ["optim"]

    def test_paths_that_the_tree_does_not_show(self, tmp_path):
        """DCP ignores an empty dictionary, which leaves a hole in its list."""
        save({"l": [{}, 5], "w": torch.ones(2)}, tmp_path / "a")
        assert_same(penstock.load(tmp_path / "a"), {"l": [None, 5], "w": torch.ones(2)})
        metadata = StorageReader(tmp_path / "a").read_metadata()
        assert metadata.planner_data == {"l.1": ("l", 1), "w": ("w",)}
        assert metadata.state_dict_metadata.keys() == {"l.1", "w"}

    def test_keys_that_need_care(self, tmp_path):
        state = {"$": {"i": torch.ones(2)}, "a\udc80": torch.ones(3), "": 5, "x": {"$": 1}}
        save(state, tmp_path / "a")
        assert_same(load(blank(state), tmp_path / "a"), state)
        assert_same(penstock.load(tmp_path / "a"), state)

    def test_without_flattening(self, tmp_path):
        state = {"w": torch.ones(2), "nested": {"t": torch.ones(3), "n": 5}}
        save(state, tmp_path / "a", planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
        assert_same(penstock.load(tmp_path / "a"), state)
        found = {"w": torch.zeros(2), "nested": {}}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(found, tmp_path / "a", planner)
        assert_same(found, state)

    def test_what_only_pickle_holds_stays_a_pickle(self, tmp_path):
        parameter = torch.nn.Parameter(torch.ones(2))
        state = {"fraction": Fraction(1, 3), "pair": (parameter, 1), "plain": (torch.ones(2), 1)}
        save(state, tmp_path / "a")
        found = load(dict.fromkeys(state), tmp_path / "a")
        assert found["fraction"] == Fraction(1, 3)
        assert type(found["pair"][0]) is torch.nn.Parameter
        plain = penstock.load(tmp_path / "a")
        assert_same(plain["plain"], state["plain"])
        assert torch.load(io.BytesIO(plain["fraction"]), weights_only=False) == Fraction(1, 3)
        assert penstock.inspect(tmp_path / "a").metadata["dcp"]["raw"] == ["fraction", "pair"]

    def test_bytes_of_the_planners_own_go_back_to_it(self, tmp_path):
        class Saver(dcp.DefaultSavePlanner):
            def transform_object(self, write_item, object):
                if write_item.type == dcp.planner.WriteItemType.BYTE_IO:
                    return io.BytesIO(b"mine:" + str(object).encode())
                return object.half()

        class Loader(dcp.DefaultLoadPlanner):
            def load_bytes(self, read_item, value):
                self.original_state_dict[read_item.dest_index.fqn] = value.read()

        save({"n": 5, "w": torch.full((3,), 1.5)}, tmp_path / "a", planner=Saver())
        found = load({"n": 0, "w": torch.zeros(3)}, tmp_path / "a", Loader())
        assert_same(found, {"n": b"mine:5", "w": torch.full((3,), 1.5)})
        assert penstock.load(tmp_path / "a")["w"].dtype == torch.float16

    def test_reads_what_penstock_saved(self, tmp_path):
        state = make_state()
        state["tie"] = state["model"]["w"]
        state["rows"] = state["model"]["w"][1:3]
        penstock.save(tmp_path / "a", state)
        assert_same(flatten_keys(load(blank(state), tmp_path / "a")), flatten_keys(state))

    def test_refuses_a_state_that_is_no_dictionary(self, tmp_path):
        penstock.save(tmp_path / "a", [torch.ones(2)])
        with pytest.raises(dcp.CheckpointException, match="loads dictionaries"):
            load({"w": torch.ones(2)}, tmp_path / "a")


class TestTargets:
    """Targets of loads."""

    def test_of_any_strides_and_types(self, tmp_path):
        weight = torch.randn(6, 8)
        names = ("transposed", "sliced", "double", "conjugate", "negative")
        save(dict.fromkeys(names, weight), tmp_path / "a")
        targets = {
            "transposed": torch.zeros(8, 6).t(),
            "sliced": torch.zeros(12, 16)[::2, 1::2],
            "double": torch.zeros(6, 8, dtype=torch.float64),
            "conjugate": torch.zeros(6, 8, dtype=torch.complex64).conj(),
            "negative": torch.zeros(6, 8, dtype=torch.complex64).conj().imag,
        }
        load(targets, tmp_path / "a")
        for name in names:
            assert torch.equal(targets[name].to(torch.float32), weight), name

    def test_of_smaller_items_are_converted_and_nothing_beside_is_touched(self, tmp_path):
        weight = torch.randn(6, 8)
        targets = {}
        for dtype in (torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool):
            targets[str(dtype)] = torch.ones(8, 8).to(dtype)
        save(dict.fromkeys(targets, weight), tmp_path / "a")
        load({name: target[1:7] for name, target in targets.items()}, tmp_path / "a")
        for target in targets.values():
            expected = torch.ones(8, 8)
            expected[1:7] = weight.to(target.dtype).float()
            assert torch.equal(target.float(), expected), target.dtype

    def test_that_share_memory(self, tmp_path):
        """Shared memory gets both names' stored value, or the load raises that they differ."""
        both = torch.full((100_000,), 2.0)
        save({"a": both.clone(), "b": both.clone()}, tmp_path / "same")
        shared = torch.zeros(100_000)
        load({"a": shared, "b": shared}, tmp_path / "same")
        assert torch.equal(shared, both)
        save({"a": torch.ones(100_000), "b": both}, tmp_path / "apart")
        for dtype in (torch.float32, torch.float64):
            shared = torch.zeros(100_000, dtype=dtype)
            with pytest.raises(CheckpointException, match="b: shares memory with a in the state"):
                load({"a": shared, "b": shared}, tmp_path / "apart")

    @pytest.mark.parametrize("bounded", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_that_overlap_in_part(self, tmp_path, monkeypatch, dtype, bounded):
        """Overlapping windows get their stored values, or the load raises that they differ."""
        if bounded:
            monkeypatch.setattr(opened, "BOUNCE_BYTES_MAX", 1)
        whole = torch.arange(8.0)
        save({"a": whole[:6].clone(), "b": whole[4:].clone()}, tmp_path / "same")
        memory = torch.zeros(8, dtype=dtype)
        load({"a": memory[:6], "b": memory[4:]}, tmp_path / "same")
        assert torch.equal(memory.float(), whole)
        save({"a": whole[:6].clone(), "b": whole[4:] + 100}, tmp_path / "apart")
        memory = torch.zeros(8, dtype=dtype)
        for targets in ({"a": memory[:6], "b": memory[4:]}, {"b": memory[4:], "a": memory[:6]}):
            with pytest.raises(CheckpointException, match=r"[ab]: shares memory with [ab] in the"):
                load(targets, tmp_path / "apart")
        # Interleaved elements do not overlap.
        memory = torch.zeros(12, dtype=dtype)
        save({"a": whole[:6].clone(), "b": whole[:6] + 100}, tmp_path / "between")
        load({"a": memory[::2], "b": memory[1::2]}, tmp_path / "between")
        assert torch.equal(memory.float(), torch.stack([whole[:6], whole[:6] + 100], 1).flatten())

    def test_through_bounded_memory(self, tmp_path, monkeypatch):
        state = {str(n): torch.full((1000,), float(n)) for n in range(20)}
        save(state, tmp_path / "a")
        monkeypatch.setattr(opened, "BOUNCE_BYTES_MAX", 8_000)
        found = load(
            {name: torch.zeros(1000, dtype=torch.float64) for name in state}, tmp_path / "a"
        )
        assert_same({name: value.float() for name, value in found.items()}, state)

    def test_that_lie_in_themselves_are_refused(self, tmp_path):
        save({"w": torch.arange(4.0)}, tmp_path / "a")
        with pytest.raises(dcp.CheckpointException, match="lie in each other"):
            load({"w": torch.zeros(1).expand(4)}, tmp_path / "a")


class TestFailures:
    def test_a_checkpoint_is_not_overwritten_unasked(self, tmp_path):
        save({"w": torch.ones(2)}, tmp_path / "a")
        with pytest.raises(dcp.CheckpointException, match="pass overwrite=True") as caught:
            save({"w": torch.zeros(2)}, tmp_path / "a")
        failure, _ = caught.value.failures[0]
        assert isinstance(failure, CheckpointExistsError)
        assert_same(penstock.load(tmp_path / "a"), {"w": torch.ones(2)})
        save({"w": torch.zeros(2)}, tmp_path / "a", overwrite=True)
        assert_same(penstock.load(tmp_path / "a"), {"w": torch.zeros(2)})
        assert len(list((tmp_path / "a").iterdir())) == 3

    def test_what_cannot_be_stored_leaves_nothing(self, tmp_path):
        quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        with pytest.raises(dcp.CheckpointException, match="w: a quantized tensor cannot"):
            save({"w": quantized}, tmp_path / "a")
        assert not (tmp_path / "a").exists()

    def test_a_failed_save_leaves_nothing(self, tmp_path):
        class Planner(dcp.DefaultSavePlanner):
            def resolve_data(self, write_item):
                raise RuntimeError("lost")

        writer = StorageWriter(tmp_path / "a")
        with pytest.raises(dcp.CheckpointException, match="lost"):
            dcp.save({"w": torch.ones(2)}, storage_writer=writer, planner=Planner(), no_dist=True)
        assert not (tmp_path / "a").exists()
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, no_dist=True)
        assert_same(penstock.load(tmp_path / "a"), {"w": torch.ones(2)})

    def test_damage_is_told_by_the_tensor(self, tmp_path):
        save({"small": torch.ones(4), "w": torch.ones(1 << 20)}, tmp_path / "a")
        (shard,) = (tmp_path / "a").glob("shard-*")
        data = bytearray(shard.read_bytes())
        data[3 << 20] ^= 4
        shard.write_bytes(data)
        with pytest.raises(dcp.CheckpointException) as caught:
            load({"w": torch.zeros(1 << 20)}, tmp_path / "a")
        failure, _ = caught.value.failures[0]
        assert isinstance(failure, CorruptCheckpointError)
        assert failure.tensor == "w"
        assert "w" in str(caught.value)
        load({"small": torch.zeros(4)}, tmp_path / "a", dcp.DefaultLoadPlanner())

    def test_of_an_unreadable_checkpoint_the_reason_is_told(self, tmp_path):
        with pytest.raises(dcp.CheckpointException, match=r"nothing|no checkpoint"):
            load({"w": torch.ones(2)}, tmp_path / "a")
        save({"w": torch.ones(2)}, tmp_path / "a")
        manifest = tmp_path / "a" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"raw", b"war"))
        with pytest.raises(dcp.CheckpointException, match=r"damaged|digest"):
            load({"w": torch.ones(2)}, tmp_path / "a")

    def test_what_was_salvaged_is_loaded_when_asked_for(self, tmp_path):
        state = {
            "small": torch.ones(4),
            "w": torch.ones(1 << 20),
            "mixed": [torch.full((1 << 18,), 3.0), 7],
            "n": 5,
        }
        save(state, tmp_path / "a")
        (shard,) = (tmp_path / "a").glob("shard-*")
        data = bytearray(shard.read_bytes())
        for lost in (state["w"], state["mixed"][0]):
            data[data.index(lost.numpy().tobytes()) + 5] ^= 4
        shard.write_bytes(data)
        report = penstock.salvage(tmp_path / "a", tmp_path / "b")
        assert {entry.name for entry in report.missing} == {"w", "mixed.0"}
        with pytest.raises(dcp.CheckpointException, match=r"StorageReader.*allow_partial=True"):
            load({"small": torch.zeros(4)}, tmp_path / "b")

        reader = StorageReader(tmp_path / "b", allow_partial=True)
        found = {"small": torch.zeros(4), "n": 0}
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert_same(found, {"small": torch.ones(4), "n": 5})
        # DCP decides about missing keys.
        found = {"w": torch.zeros(1 << 20), "mixed": [torch.zeros(1 << 18), 0], "n": 0}
        with pytest.raises(dcp.CheckpointException, match=r"Missing key.*: (w|mixed)"):
            dcp.load(found, storage_reader=reader, no_dist=True)
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
        kept = {"w": torch.zeros(1 << 20), "mixed": [torch.zeros(1 << 18), 7], "n": 5}
        assert_same(found, kept)

    @pytest.mark.parametrize(
        "note",
        [
            5,
            {"raw": 5},
            {"raw": ["w"]},
            {"planner_data": 5},
            {"planner_data": {"w": 1}},
            {"flat": 1},
        ],
    )
    def test_notes_of_others_are_refused_or_without_harm(self, tmp_path, note):
        penstock.save(tmp_path / "a", {"w": torch.ones(2), "n": 5}, metadata={"dcp": note})
        found = {"w": torch.zeros(2), "n": 0}
        try:
            load(found, tmp_path / "a")
        except dcp.CheckpointException as error:
            assert "tree makes no sense" in str(error)  # noqa: PT017
        else:
            assert_same(found, {"w": torch.ones(2), "n": 5})

    def test_collectives_are_needed(self, tmp_path):
        writer = StorageWriter(tmp_path / "a")
        with pytest.raises(ValueError, match="no_dist=True"):
            dcp.save({"n": 1}, storage_writer=writer, no_dist=True, use_collectives=False)

    @pytest.mark.slow
    def test_kills_leave_the_checkpoint_before(self, tmp_path):
        seed = random.randrange(1 << 32)
        tell("seed", seed)
        chance = random.Random(seed)
        path = tmp_path / "a"
        for _ in range(4):
            process = forks.RankPopen(
                [dcp_worker.__file__, f"replace:{path}"], stdout=subprocess.PIPE, text=True
            )
            line = process.stdout.readline()
            assert line, "it did not save"
            time.sleep(chance.uniform(0, 0.3))
            process.kill()
            # A truncated line was not acknowledged.
            said = [line, *process.stdout.read().splitlines(keepends=True)]
            process.stdout.close()
            process.wait()
            acknowledged = int([text for text in said if text.endswith("\n")][-1])
            found = load({"a": torch.zeros(300_000), "b": [torch.zeros(5)], "step": 0}, path)
            assert acknowledged <= found["step"] <= acknowledged + 1
            expected = torch.full((300_000,), float(found["step"]))
            assert torch.equal(found["a"], expected)


class TestStorage:
    """The other methods of DCP's storage interface."""

    def test_it_is_pickled_without_what_it_works_on(self, tmp_path):
        writer = StorageWriter(
            tmp_path / "a", overwrite=True, options=penstock.Options(queue_depth=2)
        )
        writer.set_up_storage_writer(True)
        writer.prepare_global_plan([dcp.SavePlan([])])
        copy = pickle.loads(pickle.dumps(writer))
        del writer
        assert copy.checkpoint_id == str(tmp_path / "a")
        dcp.save({"n": 1}, storage_writer=copy, no_dist=True)
        reader = StorageReader(tmp_path / "a")
        reader.read_metadata()
        found = {"n": 0}
        dcp.load(found, storage_reader=pickle.loads(pickle.dumps(reader)), no_dist=True)
        assert found == {"n": 1}

    def test_the_path_can_be_given_to_dcp(self, tmp_path):
        writer = StorageWriter(tmp_path / "unused")
        for step in range(2):
            path = tmp_path / f"step-{step}"
            dcp.save({"n": step}, checkpoint_id=path, storage_writer=writer, no_dist=True)
            assert penstock.load(path) == {"n": step}
        assert not (tmp_path / "unused").exists()
        reader, found = StorageReader(tmp_path / "unused"), {"n": 5}
        dcp.load(found, checkpoint_id=tmp_path / "step-1", storage_reader=reader, no_dist=True)
        assert found == {"n": 1}

    @pytest.mark.parametrize("kind", [StorageWriter, StorageReader])
    def test_which_ids_are_ours(self, kind, tmp_path):
        assert kind.validate_checkpoint_id(tmp_path)
        assert kind.validate_checkpoint_id("relative/path")
        assert kind.validate_checkpoint_id("s3://bucket/key")
        assert not kind.validate_checkpoint_id("hf://bucket/key")
        assert not kind.validate_checkpoint_id("")

    def test_plans_may_be_cached_by_one_process(self, tmp_path):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        for step in range(3):
            save(
                {"w": torch.full((3,), float(step))},
                tmp_path / "a",
                overwrite=True,
                planner=planner,
            )
            assert_same(penstock.load(tmp_path / "a"), {"w": torch.full((3,), float(step))})

    def test_a_thread_saves_while_the_state_changes(self, tmp_path):
        state = {"w": torch.ones(100_000), "n": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            future = dcp.async_save(state, storage_writer=StorageWriter(tmp_path / "a"))
        state["w"].zero_()
        future.result()
        assert_same(penstock.load(tmp_path / "a"), {"w": torch.ones(100_000), "n": 1})

    def test_what_it_writes_beside_the_state_is_little(self, tmp_path):
        save({str(n): torch.ones(1) for n in range(2000)}, tmp_path / "a")
        manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
        assert manifest["metadata"] == {"dcp": {"raw": []}}


def test_a_load_is_a_change_that_autograd_hears_of(tmp_path):
    save({"w": torch.ones(5)}, tmp_path / "ckpt")
    parameter = torch.nn.Parameter(torch.full((5,), 3.0))
    result = (parameter * parameter).sum()
    load({"w": parameter}, tmp_path / "ckpt")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.slow
class TestManyRanks:
    def test_any_number_of_ranks_loads_what_any_number_saved(self, tmp_path):
        path = tmp_path / "rows"
        commands = [f"save:{tmp_path}/{layout}:{layout}" for layout in ("rows", "grid", "hybrid")]
        commands += [f"load:{path}:{layout}" for layout in ("columns", "grid", "copies")]
        together(4, *commands, f"penstock_load:{path}")
        commands = [f"load:{tmp_path}/grid:rows", f"load:{tmp_path}/hybrid:columns"]
        together(2, *commands, f"penstock_load:{tmp_path}/grid")
        for layout in ("rows", "grid", "hybrid"):
            self.check_alone(tmp_path / layout)

    def check_alone(self, path):
        """This process loads it as well, by DCP and by Penstock."""
        expected = {name: dcp_worker.whole(name) for name in dcp_worker.SHAPES}
        plain = {"plain": torch.arange(6.0), **dcp_worker.values(0)}
        found = load(
            {"model": blank(expected), **dict.fromkeys(plain), "plain": torch.ones(6)}, path
        )
        assert_same(found["model"], expected)
        assert_same({name: found[name] for name in plain}, plain)
        state = penstock.load(path)
        assert_same(state["model"], expected)
        assert_same({name: state[name] for name in plain}, plain)
        assert list(state)[:3] == ["model", "plain", "groups"]
        assert penstock.verify(path).ok
        assert penstock.inspect(path).world_size == 4

    @pytest.mark.slow
    def test_fsdp_with_its_optimizer(self, tmp_path):
        together(4, f"fsdp_save:{tmp_path}/a", f"fsdp_load:{tmp_path}/a")
        together(3, f"fsdp_load:{tmp_path}/a")
        assert penstock.inspect(tmp_path / "a").world_size == 4

    def test_reads_what_penstock_saved(self, tmp_path):
        path = tmp_path / "a"
        together(4, f"penstock_save:{path}:grid", f"load:{path}:rows")
        together(2, f"load:{path}:columns")
        assert penstock.verify(path).ok

    @pytest.mark.slow
    def test_saves_in_the_background(self, tmp_path):
        commands = [f"save_async:{tmp_path}/t:rows:thread", f"save_async:{tmp_path}/p:rows:process"]
        assert launch(2, *commands) is None

    @pytest.mark.parametrize("rank", [0, 1])
    def test_if_one_fails_all_fail(self, tmp_path, rank):
        together(2, f"save:{tmp_path}/a:rows", f"fail:{tmp_path}/a:{rank}")

    @pytest.mark.slow
    def test_if_one_dies_nothing_is_committed(self, tmp_path):
        path = tmp_path / "a"
        together(2, f"save:{path}:rows")
        before = (path / "manifest.json").read_bytes()
        with closing(Job(2)) as job:
            job.is_broken = True
            job.start(dcp_worker.die, path, 1)
            (told,) = job.finish(ranks=[0])
        assert isinstance(told, Exception)
        assert (path / "manifest.json").read_bytes() == before
        together(2, f"load:{path}:columns", f"refuse:{path}")
        assert penstock.verify(path).ok


def test_a_tensor_in_a_file_is_stored_as_a_tensor(tmp_path):
    wanted = torch.arange(6.0).reshape(2, 3)
    held = Held(tmp_path / "held", {"moment": wanted})
    save({"a": held.tensor("moment"), "b": (1, held.tensor("moment"))}, tmp_path / "c")
    assert_same(penstock.load(tmp_path / "c"), {"a": wanted, "b": (1, wanted.clone())})
    state = {"a": torch.zeros(2, 3), "b": (0, None)}
    dcp.load(state, storage_reader=StorageReader(tmp_path / "c"))
    assert_same(state["a"], wanted)
    part = held.tensor("moment", like=wanted)
    with pytest.raises(
        (penstock.PenstockError, dcp.api.CheckpointException), match="x: of a tensor"
    ):
        save({"x": part}, tmp_path / "d")
    assert not (tmp_path / "d" / "manifest.json").exists()


def test_a_model_lies_in_shards_of_its_own_beside_its_files(tmp_path):
    state = {"model": {"w": torch.randn(5, 7), "b": torch.ones(3)}, "moments": torch.ones(9)}
    save(state, tmp_path / "a", groups={"model": ""}, files={"config.json": b"{}"})
    weight_map = json.loads((tmp_path / "a" / INDEX).read_text())["weight_map"]
    assert sorted(weight_map) == sorted(state["model"])
    (shard,) = set(weight_map.values())
    assert_same(load_file(tmp_path / "a" / shard)["w"], state["model"]["w"])
    assert (tmp_path / "a" / "config.json").read_bytes() == b"{}"
    assert_same(load(blank(state), tmp_path / "a"), state)
    with pytest.raises(CheckpointException, match='the group "" has no tensors'):
        save(state, tmp_path / "b", groups={"none": ""})
    (tmp_path / "c" / "config.json").mkdir(parents=True)
    with pytest.raises(CheckpointException, match=r"config\.json is a directory"):
        save(state, tmp_path / "c", files={"config.json": b"{}"})
    assert os.listdir(tmp_path / "c") == ["config.json"]


def test_the_package_does_not_import_it():
    code = "import penstock, sys; print([m for m in sys.modules if 'integrations' in m])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
    assert Path(penstock.__file__).parent.joinpath("integrations", "__init__.py").exists()
