"""`penstock.convert`: foreign checkpoints, equal bit for bit, or refused with the reason."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import sys
import textwrap
from collections import OrderedDict

import numpy as np
import pytest

import forks
import penstock
from compare import assert_same
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    MissingDependencyError,
    UnsupportedStateError,
)

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from penstock.checkpoint.converting.storable import with_pickles  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Custom:
    """A class that no pickle may construct unless it is trusted."""

    made = 0

    def __init__(self, value):
        self.value = value

    def __setstate__(self, state):
        type(self).made += 1
        self.__dict__.update(state)


def tensors():
    torch.manual_seed(3)
    weight = torch.randn(5, 7)
    return OrderedDict(
        w=weight,
        tied=weight,
        row=weight[2],
        half=torch.randn(3).bfloat16(),
        empty=torch.zeros(0, 4),
    )


def state_of(step=7):
    return {
        "model": tensors(),
        "optim": [{"lr": 0.1, "betas": (0.9, 0.99), "state": {0: {"step": torch.tensor(3.0)}}}],
        "step": step,
        "nan": float("nan"),
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }


def is_tied(state, name="tied"):
    return state["w"].data_ptr() == state[name].data_ptr()


def converted(source, path, **arguments):
    report = penstock.convert(source, path, **arguments)
    assert penstock.verify(path).ok
    return penstock.load(path), report


class TestTorch:
    @pytest.mark.parametrize("is_zip", [True, False])
    def test_what_torch_load_gives_comes_back_ties_and_all(self, tmp_path, is_zip):
        state = state_of()
        torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
        before = (tmp_path / "a.pt").read_bytes()
        found, report = converted(tmp_path / "a.pt", tmp_path / "a")
        assert_same(found, state)
        assert is_tied(found["model"])
        assert found["model"]["row"].data_ptr() == found["model"]["w"][2].data_ptr()
        assert (report.kind, report.trusted, report.pickled) == ("torch", (), ())
        assert penstock.inspect(tmp_path / "a").metadata == {
            "converted": {"from": "torch", "pickled": []}
        }
        assert (tmp_path / "a.pt").read_bytes() == before

    def test_a_pickle_of_more_is_refused_with_its_class_and_the_choice(self, tmp_path):
        Custom.made = 0
        torch.save({"a": Custom(3), "b": torch.ones(2)}, tmp_path / "a.pt")
        for is_zip in (True, False):
            path = tmp_path / f"{is_zip}.pt"
            torch.save({"a": Custom(3)}, path, _use_new_zipfile_serialization=is_zip)
            with pytest.raises(UnsupportedStateError) as caught:
                penstock.convert(path, tmp_path / "a")
            for text in (str(path), f"{__name__}.Custom", "trust=True (--trust)"):
                assert text in str(caught.value)
        assert Custom.made == 0
        assert not (tmp_path / "a").exists()

    def test_what_is_trusted_is_stored_and_what_has_no_place_as_pickled_bytes(self, tmp_path):
        state = {"args": argparse.Namespace(lr=0.1), "more": [{"c": Custom(3)}], "w": torch.ones(2)}
        torch.save(state, tmp_path / "a.pt")
        found, report = converted(tmp_path / "a.pt", tmp_path / "a", trust=True)
        assert report.trusted == ("argparse.Namespace", f"{__name__}.Custom")
        assert report.pickled == ("args", "more.0.c")
        assert penstock.inspect(tmp_path / "a").metadata["converted"]["pickled"] == [
            "args",
            "more.0.c",
        ]
        assert pickle.loads(found["args"]) == state["args"]
        assert pickle.loads(found["more"][0]["c"]).value == 3
        assert_same(found["w"], state["w"])

    def test_a_value_without_a_place_is_named_though_its_pickle_is_plain(self, tmp_path):
        quantized = torch.quantize_per_tensor(torch.eye(3), 0.5, 0, torch.qint8)
        torch.save({"a": {"b": quantized}}, tmp_path / "a.pt")
        with pytest.raises(UnsupportedStateError, match=r"a\.b.*--trust") as caught:
            penstock.convert(tmp_path / "a.pt", tmp_path / "a")
        assert caught.value.key == "a.b"
        found, report = converted(tmp_path / "a.pt", tmp_path / "a", trust=True)
        assert report.pickled == ("a.b",)
        assert torch.equal(pickle.loads(found["a"]["b"]).dequantize(), torch.eye(3))

    def test_a_sparse_tensor_comes_back_as_one(self, tmp_path):
        torch.save({"a": torch.eye(3).to_sparse()}, tmp_path / "a.pt")
        found, _ = converted(tmp_path / "a.pt", tmp_path / "a")
        assert_same(found, {"a": torch.eye(3).to_sparse()})

    def test_a_whole_module_is_refused(self, tmp_path):
        torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
        with pytest.raises(UnsupportedStateError, match="state_dict"):
            penstock.convert(tmp_path / "a.pt", tmp_path / "a", trust=True)

    def test_a_class_that_is_gone_is_named(self, tmp_path, monkeypatch):
        torch.save({"a": Custom(3)}, tmp_path / "a.pt")
        monkeypatch.delattr(sys.modules[__name__], "Custom")
        with pytest.raises(MissingDependencyError, match="Custom"):
            penstock.convert(tmp_path / "a.pt", tmp_path / "a", trust=True)

    def test_a_file_that_is_cut_is_damaged(self, tmp_path):
        for is_zip in (True, False):
            path = tmp_path / f"{is_zip}.pt"
            torch.save({"a": torch.ones(1000)}, path, _use_new_zipfile_serialization=is_zip)
            os.truncate(path, path.stat().st_size // 2)
            with pytest.raises(CorruptCheckpointError, match=str(path)):
                penstock.convert(path, tmp_path / "a")
        assert not (tmp_path / "a").exists()

    def test_a_bit_that_has_changed_in_a_file_is_noticed(self, tmp_path):
        """Found by the archive's checksums, which PyTorch writes but never checks."""
        weight = torch.arange(10_000.0)
        torch.save({"w": weight}, tmp_path / "a.pt")
        data = bytearray((tmp_path / "a.pt").read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "a.pt").write_bytes(data)
        assert not torch.equal(torch.load(tmp_path / "a.pt")["w"], weight)
        with pytest.raises(CorruptCheckpointError, match=f"{tmp_path / 'a.pt'}.*CRC"):
            penstock.convert(tmp_path / "a.pt", tmp_path / "a")
        assert not (tmp_path / "a").exists()

    @pytest.mark.skipif(
        not hasattr(torch.serialization, "set_crc32_options"),
        reason="this PyTorch always writes checksums",
    )
    def test_a_file_without_checksums_is_taken(self, tmp_path):
        weight = torch.arange(10_000.0)
        torch.serialization.set_crc32_options(False)
        try:
            torch.save({"w": weight}, tmp_path / "b.pt")
        finally:
            torch.serialization.set_crc32_options(True)
        assert torch.equal(converted(tmp_path / "b.pt", tmp_path / "b")[0]["w"], weight)

    @pytest.mark.parametrize("is_zip", [True, False])
    def test_a_file_that_has_changed_is_damaged_whatever_that_makes_of_it(self, tmp_path, is_zip):
        path, chooser = tmp_path / "a.pt", random.Random(5)
        state = {"model": {"w": torch.ones(3), "b": [1, 2.5, "x", None]}}
        torch.save(state, path, _use_new_zipfile_serialization=is_zip)
        written = path.read_bytes()
        for _ in range(200):
            data = bytearray(written)
            data[chooser.randrange(len(data))] = chooser.randrange(256)
            path.write_bytes(data)
            try:
                penstock.convert(path, tmp_path / "a", overwrite=True, trust=True)
            except penstock.PenstockError:
                continue
            # In files without checksums a flipped bit may change any value.
            assert not is_zip or repr(penstock.load(tmp_path / "a")) == repr(state)

    def test_what_holds_itself_is_refused_and_pickled_if_it_is_trusted(self, tmp_path):
        within: dict = {"w": torch.ones(2)}
        within["itself"] = within
        torch.save({"a": [within]}, tmp_path / "a.pt")
        with pytest.raises(UnsupportedStateError, match="nested deeper than"):
            penstock.convert(tmp_path / "a.pt", tmp_path / "a")
        found, report = converted(tmp_path / "a.pt", tmp_path / "a", trust=True)
        assert found["a"][0]["itself"]["w"].tolist() == [1, 1]
        assert len(report.pickled) == 1

    def test_what_can_be_pickled_once_only_is_named(self):
        class Once:
            def __reduce__(self):
                raise TypeError("not twice")

        with pytest.raises(UnsupportedStateError, match=r"a\.0: .*Once.*not twice"):
            with_pickles({"a": [Once()]}, is_strict=False)

    def test_what_is_complete_stays_unless_it_is_to_be_replaced(self, tmp_path):
        torch.save({"a": 1}, tmp_path / "a.pt")
        penstock.save(tmp_path / "a", {"b": 2})
        with pytest.raises(CheckpointExistsError):
            penstock.convert(tmp_path / "a.pt", tmp_path / "a")
        assert penstock.load(tmp_path / "a") == {"b": 2}
        found, report = converted(tmp_path / "a.pt", tmp_path / "a", overwrite=True, step=12)
        assert (found, report.step, penstock.inspect(tmp_path / "a").step) == ({"a": 1}, 12, 12)

    def test_memory_is_bounded(self, tmp_path):
        """Bounds private memory only: the kernel can reclaim pages of the file."""
        megabytes = 256
        torch.save({"w": torch.ones(megabytes << 18)}, tmp_path / "a.pt")
        program = f"""
            import penstock
            penstock.convert({str(tmp_path / "tiny.pt")!r}, {str(tmp_path / "tiny")!r})
            from penstock.checkpoint.converting.convert import convert
            with open("/proc/self/status") as f:
                before = [int(l.split()[1]) for l in f if l.startswith("RssAnon")][0]
            peak = 0
            def look(done, total):
                global peak
                with open("/proc/self/status") as f:
                    now = [int(l.split()[1]) for l in f if l.startswith("RssAnon")][0]
                peak = max(peak, now - before)
            convert({str(tmp_path / "a.pt")!r}, {str(tmp_path / "a")!r}, progress=look)
            print(peak >> 10)
        """
        torch.save({"w": torch.ones(3)}, tmp_path / "tiny.pt")
        done = forks.run(["-c", textwrap.dedent(program)])
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < megabytes // 2
        assert penstock.verify(tmp_path / "a").ok


class TestDcp:
    def save(self, path, state):
        dcp.save(state, checkpoint_id=path, no_dist=True)

    def test_the_nested_state_comes_back_with_whole_tensors(self, tmp_path):
        state = state_of()
        self.save(tmp_path / "d", state)
        found, report = converted(tmp_path / "d", tmp_path / "a")
        assert report.kind == "dcp"
        assert list(found) == list(state)
        for name, tensor in state["model"].items():
            assert_same(found["model"][name], tensor)
        assert found["optim"][0]["betas"] == (0.9, 0.99)
        assert found["random"] == state["random"]
        assert_same(found["numpy"], state["numpy"])

    def test_tensors_that_dcp_has_saved_as_safetensors_are_read(self, tmp_path):
        """DCP's own reader cannot read the files of this writer."""
        state = {
            "model": {
                "w": torch.arange(12.0).view(3, 4),
                "half": torch.ones(5, dtype=torch.bfloat16),
                "none": torch.ones(0, 4),
                "one": torch.tensor(7),
            },
            "step": 4,
        }
        writer = dcp.FileSystemWriter(
            tmp_path / "d",
            thread_count=2,
            serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS,
        )
        dcp.save(state, storage_writer=writer, no_dist=True)
        found, report = converted(tmp_path / "d", tmp_path / "a")
        assert (report.kind, found["step"]) == ("dcp", 4)
        assert_same(found["model"], state["model"])
        data = max((tmp_path / "d").glob("*.distcp"), key=os.path.getsize)
        content = data.read_bytes()
        # As if a rank held two pieces of a tensor.
        assert b"[0, 0]" in content
        data.write_bytes(content.replace(b"[0, 0]", b"[0, 2]"))
        with pytest.raises(CorruptCheckpointError, match=r"at \[0, 2\] over it"):
            penstock.convert(tmp_path / "d", tmp_path / "b")
        data.write_bytes(content.replace(b'"data_offsets":[', b'"data_offsets":{'))
        with pytest.raises(CorruptCheckpointError, match="the header is no JSON"):
            penstock.convert(tmp_path / "d", tmp_path / "b")

    @pytest.mark.slow
    def test_what_ranks_saved_in_boxes_is_put_together(self, tmp_path):
        import dcp_enable_worker
        from dcp_worker import SHAPES, check, values, whole
        from ranks import Job

        job = Job(2)
        try:
            job.call(dcp_enable_worker.own_format, f"{tmp_path}/d", "rows", "0")
        finally:
            job.close()
        found, _ = converted(tmp_path / "d", tmp_path / "a")
        check({name: found["model"][name] for name in SHAPES}, {n: whole(n) for n in SHAPES})
        check({key: found[key] for key in values(0)}, values(0))

    def test_values_and_metadata_are_unpickled_only_if_trusted(self, tmp_path):
        Custom.made = 0
        self.save(tmp_path / "d", {"a": {"c": Custom(3)}, "w": torch.ones(2)})
        with pytest.raises(UnsupportedStateError, match=rf"a\.c.*{__name__}\.Custom"):
            penstock.convert(tmp_path / "d", tmp_path / "a")
        assert Custom.made == 0
        found, report = converted(tmp_path / "d", tmp_path / "a", trust=True)
        assert report.pickled == ("a.c",)
        assert pickle.loads(found["a"]["c"]).value == 3
        with open(tmp_path / "d" / ".metadata", "rb+") as file:
            metadata = pickle.load(file)
            metadata.planner_data = Custom(metadata.planner_data)
            file.seek(0)
            pickle.dump(metadata, file)
        Custom.made = 0
        with pytest.raises(UnsupportedStateError, match=r"\.metadata.*Custom.*--trust"):
            penstock.convert(tmp_path / "d", tmp_path / "b")
        assert Custom.made == 0

    def test_one_that_is_half_written_is_refused_with_what_is_missing(self, tmp_path):
        for name in ("unfinished", "incomplete", "cut", "damaged"):
            self.save(tmp_path / name, {"w": torch.ones(100)})
        (tmp_path / "unfinished" / ".metadata").unlink()
        (tmp_path / "incomplete" / "__0_0.distcp").unlink()
        os.truncate(tmp_path / "cut" / "__0_0.distcp", 100)
        os.truncate(tmp_path / "damaged" / ".metadata", 100)
        for name, missing in (
            ("unfinished", r"\.metadata"),
            ("incomplete", "__0_0"),
            ("cut", "__0_0"),
        ):
            with pytest.raises(IncompleteCheckpointError, match=missing):
                penstock.convert(tmp_path / name, tmp_path / "a")
        with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
            penstock.convert(tmp_path / "damaged", tmp_path / "a")
        assert not (tmp_path / "a").exists()


class TestLightning:
    def test_a_file_keeps_everything_and_its_step(self, tmp_path):
        state = {
            "pytorch-lightning_version": "2.6.6",
            "global_step": 31,
            "epoch": 2,
            "state_dict": tensors(),
            "optimizer_states": [{"state": {}, "param_groups": []}],
            "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "a.ckpt"}},
            "loops": {"fit_loop": {"state_dict": {}}},
        }
        torch.save(state, tmp_path / "a.ckpt")
        found, report = converted(tmp_path / "a.ckpt", tmp_path / "a")
        assert_same(found, state)
        assert (report.kind, report.step) == ("lightning", 31)
        assert penstock.inspect(tmp_path / "a").step == 31
        torch.save({"w": 1}, tmp_path / "b.pt")
        with pytest.raises(CheckpointNotFoundError, match="pytorch-lightning_version"):
            penstock.convert(tmp_path / "b.pt", tmp_path / "b", kind="lightning")

    def test_shards_of_a_strategy_and_what_is_beside_them_are_one_state(self, tmp_path):
        dcp.save({"state_dict": tensors()}, checkpoint_id=tmp_path / "d", no_dist=True)
        torch.save({"global_step": 5, "epoch": 1}, tmp_path / "d" / "meta.pt")
        found, report = converted(tmp_path / "d", tmp_path / "a")
        assert (report.kind, report.step, found["epoch"]) == ("lightning", 5, 1)
        assert_same(found["state_dict"]["w"], tensors()["w"])


class TestDeepSpeed:
    RANKS = 2

    def save(self, root, *, stage=1, tag="global_step12"):
        directory = root / tag
        directory.mkdir(parents=True)
        for rank in range(self.RANKS):
            model = {
                "module": tensors() if stage < 3 else OrderedDict(),
                "param_shapes": [OrderedDict(w=torch.Size([5, 7]))] if stage else None,
                "dp_world_size": self.RANKS,
                "mp_world_size": 1,
                "global_steps": 12,
            }
            if stage == 3 or rank == 0:
                prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
                torch.save(model, directory / f"{prefix}mp_rank_00_model_states.pt")
            if stage:
                name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
                torch.save(
                    {"optimizer_state_dict": {"rank": rank, "w": torch.ones(4)}}, directory / name
                )
        (root / "latest").write_text(tag)

    @pytest.mark.parametrize("stage", [0, 1, 3])
    def test_all_files_of_the_latest_tag_are_one_state(self, tmp_path, stage):
        self.save(tmp_path / "d", stage=stage, tag="global_step4")
        self.save(tmp_path / "d", stage=stage)
        found, report = converted(tmp_path / "d", tmp_path / "a")
        assert (report.kind, report.step) == ("deepspeed", 12)
        files = {name.removesuffix(".pt") for name in os.listdir(tmp_path / "d" / "global_step12")}
        assert set(found) == files
        for name, state in found.items():
            path = tmp_path / "d" / "global_step12" / f"{name}.pt"
            assert_same(state, torch.load(path, weights_only=True))
        if stage < 3:
            assert is_tied(found["mp_rank_00_model_states"]["module"])
        # A tag by its path.
        converted(tmp_path / "d" / "global_step4", tmp_path / "b")

    @pytest.mark.parametrize(
        ("stage", "name"),
        [
            (1, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
            (1, "mp_rank_00_model_states.pt"),
            (3, "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ],
    )
    def test_files_of_ranks_that_are_missing_are_named(self, tmp_path, stage, name):
        self.save(tmp_path / "d", stage=stage)
        (tmp_path / "d" / "global_step12" / name).unlink()
        expected = name if "zero" in name else "model states"
        with pytest.raises(IncompleteCheckpointError, match=f"{expected}.*missing"):
            penstock.convert(tmp_path / "d", tmp_path / "a")
        assert not (tmp_path / "a").exists()

    def test_all_of_the_optimizer_missing_and_a_tag_that_is_gone_are_noticed(self, tmp_path):
        self.save(tmp_path / "d")
        for path in (tmp_path / "d" / "global_step12").glob("*optim*"):
            path.unlink()
        with pytest.raises(IncompleteCheckpointError, match="zero_pp_rank_0"):
            penstock.convert(tmp_path / "d", tmp_path / "a")
        (tmp_path / "d" / "latest").write_text("global_step99")
        with pytest.raises(IncompleteCheckpointError, match="global_step99"):
            penstock.convert(tmp_path / "d", tmp_path / "a")

    def save_universal(self, root):
        """Writes the files of `ds_to_universal`."""
        self.save(root)
        universal = root / "universal"
        for name in ("w", "layers.0.weight"):
            (universal / "zero" / name).mkdir(parents=True)
            for part in ("fp32", "exp_avg"):
                torch.save({"param": torch.ones(3)}, universal / "zero" / name / f"{part}.pt")
            torch.save(torch.tensor(3.0), universal / "zero" / name / "step.pt")
        torch.save({"param_groups": [{"lr": 0.1}]}, universal / "zero" / "optimizer_state.pt")
        model = "mp_rank_00_model_states.pt"
        (root / "global_step12" / model).rename(universal / model)
        (root / "latest_universal").write_text("universal")
        return universal

    def test_a_universal_directory_is_one_state_of_its_parameters(self, tmp_path):
        universal = self.save_universal(tmp_path / "d")
        (tmp_path / "d" / "latest").unlink()
        for place in (universal, tmp_path / "d"):
            found, report = converted(place, tmp_path / "a", overwrite=True)
            assert (report.kind, report.step) == ("deepspeed", 12)
            assert set(found) == {"mp_rank_00_model_states", "zero"}
            assert set(found["zero"]) == {"w", "layers.0.weight", "optimizer_state"}
            assert found["zero"]["optimizer_state"] == {"param_groups": [{"lr": 0.1}]}
            parts = found["zero"]["layers.0.weight"]
            assert parts["exp_avg"]["param"].tolist() == [1, 1, 1]
            assert parts["step"].item() == 3

    @pytest.mark.parametrize("name", ["optimizer_state.pt", "w/fp32.pt"])
    def test_a_universal_directory_that_is_half_written_is_refused(self, tmp_path, name):
        universal = self.save_universal(tmp_path / "d")
        (universal / "zero" / name).unlink()
        with pytest.raises(IncompleteCheckpointError, match=f"{name}.*missing"):
            penstock.convert(universal, tmp_path / "a")

    def test_a_tag_that_was_saved_with_penstock_is_left_to_load(self, tmp_path):
        self.save(tmp_path / "d")
        penstock.save(tmp_path / "d" / "global_step12", {"w": torch.ones(2)})
        with pytest.raises(CheckpointExistsError, match=r"global_step12.*already"):
            penstock.convert(tmp_path / "d", tmp_path / "a")


class TestAccelerate:
    @pytest.fixture
    def saved(self, tmp_path):
        """Saves by accelerate itself: a model, its optimizer and scheduler, and a custom object."""
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        accelerator.register_for_checkpointing(scheduler.scheduler)
        accelerator.save_state(str(tmp_path / "d"))
        yield tmp_path / "d", model, optimizer
        accelerator.free_memory()

    def test_each_file_is_a_part_of_one_state(self, tmp_path, saved):
        path, model, optimizer = saved
        found, report = converted(path, tmp_path / "a")
        assert report.kind == "accelerate"
        assert {"model", "optimizer", "scheduler", "random_states_0", "custom_checkpoint_0"} == set(
            found
        )
        # In the order of its file.
        assert_same(dict(sorted(found["model"].items())), dict(sorted(model.state_dict().items())))
        assert_same(found["optimizer"], optimizer.state_dict())
        assert_same(found["random_states_0"]["torch_manual_seed"], torch.get_rng_state())

    def test_weights_in_several_files_are_one_and_a_missing_one_is_named(self, tmp_path, saved):
        from safetensors.torch import load_file, save_file

        path, model, _ = saved
        whole = load_file(path / "model.safetensors")
        (path / "model.safetensors").unlink()
        shards = {f"model-0000{n}-of-00002.safetensors": name for n, name in enumerate(whole, 1)}
        for file, name in shards.items():
            save_file({name: whole[name]}, path / file)
        index = {"weight_map": {name: file for file, name in shards.items()}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        found, _ = converted(path, tmp_path / "a")
        # In the order of its file.
        assert_same(dict(sorted(found["model"].items())), dict(sorted(model.state_dict().items())))
        (path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(IncompleteCheckpointError, match="model-00002"):
            penstock.convert(path, tmp_path / "b")

    def test_types_of_safetensors_that_are_not_known_are_not_called_damage(self, tmp_path, saved):
        path, _, _ = saved

        def write(kind):
            entry = {"dtype": kind, "shape": [4], "data_offsets": [0, 4]}
            header = json.dumps({"__metadata__": None, "w": entry}).encode()
            data = len(header).to_bytes(8, "little") + header + bytes([0, 64, 56, 127])
            (path / "model.safetensors").write_bytes(data)

        write("F8_E4M3FNUZ")
        found, _ = converted(path, tmp_path / "a")
        expected = torch.tensor([0, 64, 56, 127], dtype=torch.uint8).view(torch.float8_e4m3fnuz)
        assert_same(found["model"]["w"], expected)
        write("F5_NEW")
        with pytest.raises(UnsupportedStateError, match="'w' has elements of the type F5"):
            penstock.convert(path, tmp_path / "b")

    def test_ranks_and_models_that_are_missing_are_named(self, tmp_path, saved):
        path, _, _ = saved
        (path / "random_states_0.pkl").rename(path / "random_states_1.pkl")
        with pytest.raises(IncompleteCheckpointError, match="random_states_0"):
            penstock.convert(path, tmp_path / "a")
        (path / "random_states_1.pkl").rename(path / "random_states_0.pkl")
        (path / "model.safetensors").unlink()
        with pytest.raises(IncompleteCheckpointError, match="model"):
            penstock.convert(path, tmp_path / "a")

    def test_what_deepspeed_has_saved_for_it_is_read_beside_the_rest(self, tmp_path, saved):
        path, _, _ = saved
        (path / "model.safetensors").unlink()
        TestDeepSpeed().save(path, tag="pytorch_model")
        found, report = converted(path, tmp_path / "a")
        assert report.kind == "accelerate"
        assert {"pytorch_model", "scheduler", "random_states_0"} < set(found)
        model = found["pytorch_model"]["mp_rank_00_model_states"]
        assert_same(model["module"]["w"], tensors()["w"])
        (path / "pytorch_model" / "mp_rank_00_model_states.pt").unlink()
        with pytest.raises(IncompleteCheckpointError, match="model states are missing"):
            penstock.convert(path, tmp_path / "b")

    def test_one_without_what_is_written_last_is_half_written(self, tmp_path, saved):
        path, _, _ = saved
        (path / "random_states_0.pkl").unlink()
        with pytest.raises(IncompleteCheckpointError, match=r"random_states_0.*last"):
            penstock.convert(path, tmp_path / "a")

    def test_what_fsdp_has_saved_by_dcp_is_read_by_it(self, tmp_path, saved):
        path, _, _ = saved
        (path / "model.safetensors").unlink()
        dcp.save({"model": tensors()}, checkpoint_id=path / "pytorch_model_fsdp_0", no_dist=True)
        found, _ = converted(path, tmp_path / "a")
        assert_same(found["pytorch_model_fsdp_0"]["model"]["w"], tensors()["w"])
        (path / "pytorch_model_fsdp_0" / ".metadata").unlink()
        with pytest.raises(IncompleteCheckpointError, match=r"\.metadata"):
            penstock.convert(path, tmp_path / "b")


class TestSources:
    def test_safetensors_are_left_to_import(self, tmp_path):
        from safetensors.torch import save_file

        (tmp_path / "d").mkdir()
        save_file({"w": torch.ones(2)}, tmp_path / "d" / "model.safetensors")
        for path in (tmp_path / "d", tmp_path / "d" / "model.safetensors"):
            with pytest.raises(CheckpointNotFoundError, match=f"import {tmp_path / 'd'}"):
                penstock.convert(path, tmp_path / "a")

    def test_pointers_of_git_lfs_are_named_with_the_way_to_the_file(self, tmp_path):
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n"
        (tmp_path / "a.pt").write_text(pointer)
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "mp_rank_00_model_states.pt").write_text(pointer)
        (tmp_path / "dcp").mkdir()
        (tmp_path / "dcp" / ".metadata").write_text(pointer)
        (tmp_path / "accelerate").mkdir()
        torch.save({}, tmp_path / "accelerate" / "random_states_0.pkl")
        (tmp_path / "accelerate" / "model.safetensors").write_text(pointer)
        for above in ("latest", "latest_universal"):
            (tmp_path / above).mkdir()
            (tmp_path / above / above).write_text(pointer)
        for name in ("a.pt", "d", "dcp", "accelerate", "latest", "latest_universal"):
            for kind in (None, "torch") if name == "a.pt" else (None,):
                with pytest.raises(
                    penstock.PenstockError, match=r"pointer of Git LFS.*git lfs pull"
                ):
                    penstock.convert(tmp_path / name, tmp_path / "a", kind=kind)
        with pytest.raises(CheckpointNotFoundError, match="git lfs pull"):
            penstock.load(tmp_path / "a.pt")

    def test_what_is_nothing_of_that_is_named(self, tmp_path):
        (tmp_path / "empty").mkdir()
        (tmp_path / "text").write_text("hello")
        os.mkfifo(tmp_path / "pipe")
        for name in ("empty", "text", "missing", "pipe"):
            with pytest.raises(CheckpointNotFoundError, match=name):
                penstock.convert(tmp_path / name, tmp_path / "a")
        with pytest.raises(CheckpointNotFoundError, match="nothing to convert"):
            penstock.convert(tmp_path / "missing", tmp_path / "a", kind="lightning")
        torch.save({"a": 1}, tmp_path / "a.pt")
        with pytest.raises(CheckpointNotFoundError, match="a directory"):
            penstock.convert(tmp_path / "a.pt", tmp_path / "a", kind="dcp")
        with pytest.raises(ValueError, match="must be one of"):
            penstock.convert(tmp_path / "a.pt", tmp_path / "a", kind="orbax")

    def test_a_checkpoint_of_penstock_and_its_own_directory_are_refused(self, tmp_path):
        penstock.save(tmp_path / "a", {"a": 1})
        with pytest.raises(CheckpointExistsError, match="already"):
            penstock.convert(tmp_path / "a", tmp_path / "b")
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "d", no_dist=True)
        with pytest.raises(CheckpointExistsError, match="another directory"):
            penstock.convert(tmp_path / "d", tmp_path / "d")

    def test_a_tree_without_anything_to_pickle_is_as_it_was(self):
        state = {"a": [1, (2, OrderedDict(b=3))], "s": {1, 2}, "t": torch.ones(2)}
        found, pickled = with_pickles(state, is_strict=True)
        assert_same(found, state)
        assert pickled == []


class TestCommand:
    def run(self, *arguments):
        command = ["-m", "penstock", "convert", *map(str, arguments)]
        return forks.run(command)

    def test_it_converts_and_tells(self, tmp_path):
        torch.save({"w": torch.ones(3), "args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
        refused = self.run(tmp_path / "a.pt", tmp_path / "a")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "argparse.Namespace" in refused.stderr
        assert "--trust" in refused.stderr
        done = self.run(tmp_path / "a.pt", tmp_path / "a", "--trust", "--step", "3", "--json")
        report = json.loads(done.stdout)
        assert (done.returncode, report["kind"], report["step"]) == (0, "torch", 3)
        assert report["pickled"] == ["args"]
        assert self.run(tmp_path / "a.pt", tmp_path / "a", "--trust").returncode == 1
        told = self.run(tmp_path / "a.pt", tmp_path / "a", "--trust", "--overwrite")
        assert told.returncode == 0
        assert "1 tensor" in told.stdout
        assert "pickled bytes: args" in told.stdout
        assert self.run(tmp_path / "a.pt", tmp_path / "b", "--from", "orbax").returncode == 2
