"""The copy that `enable` makes of a state for `dcp.async_save`."""

from __future__ import annotations

import errno
import pickle
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_saver

import penstock
from penstock import _native
from penstock.integrations.dcp import enable, patches

if not hasattr(state_dict_saver, "DefaultStager"):
    pytest.skip("PyTorch before 2.9 makes no stager itself", allow_module_level=True)

from penstock.integrations.dcp.host_stager import HostStager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


@pytest.fixture
def stager():
    stager = HostStager()
    yield stager
    stager.close()


class TestCopies:
    def test_a_state_that_changes_at_once_is_saved_as_it_was(self, tmp_path):
        large, small = torch.ones(5_000_000), [torch.full((n,), float(n)) for n in range(1, 300)]
        with enable():
            for step in range(3):
                large.fill_(step)
                state = {"large": large, "small": small, "step": step}
                pending = dcp.async_save(state, checkpoint_id=tmp_path / str(step))
                large.fill_(-1)
                for one in small:
                    one.neg_()
                pending.result()
                for one in small:
                    one.neg_()
        for step in range(3):
            found = penstock.load(tmp_path / str(step))
            assert found["step"] == step
            assert found["large"].eq(step).all()
            assert all(map(torch.equal, found["small"], small))

    def test_tensors_of_every_layout_keep_their_elements(self, stager):
        base = torch.arange(1000, dtype=torch.float64)
        grid = base[:900].view(30, 30)
        state = {
            "base": base,
            "columns": grid.t(),
            "steps": grid[3::2, 5::3],
            "repeated": base[17:18].expand(40),
            "bits": base[5:9].view(torch.int8)[3:],
            "scalar": base[999],
            "parameter": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
            "flags": torch.tensor([True, False]),
            "empty": torch.empty(0, 4),
            "nothing": base[7:7],
            "float8": torch.arange(5.0).to(torch.float8_e4m3fn),
            "complex": torch.tensor([[1 + 2j, 3j]]),
            "conjugate": torch.tensor([1 + 2j]).conj(),
            "negative": torch.tensor([1 + 2j]).conj().imag,
            "sparse": torch.eye(3).to_sparse(),
        }
        expected = {name: value.detach().clone() for name, value in state.items()}
        for _ in range(2):
            copied = stager.stage(state)
            for name, value in copied.items():
                assert value.dtype == expected[name].dtype
                assert value.to_dense().equal(expected[name].resolve_conj().to_dense()), name
        assert copied["columns"].stride() == state["columns"].stride()
        assert copied["base"].untyped_storage().data_ptr() == (
            copied["columns"].untyped_storage().data_ptr()
        )
        base.zero_()
        assert copied["base"].equal(expected["base"])

    def test_containers_keep_their_kinds(self, stager):
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        state = {"model": module.state_dict(), "pair": (torch.ones(2), [1, None]), "n": {1: "x"}}
        copied = stager.stage(state)
        assert type(copied["model"]) is OrderedDict
        assert copied["model"]._metadata == state["model"]._metadata
        assert copied["model"]._metadata is not state["model"]._metadata
        assert copied["pair"][1] == [1, None]
        assert copied["n"] == {1: "x"}
        assert type(copied["pair"]) is tuple

    def test_a_pickle_of_one_tensor_holds_no_other(self, stager):
        copied = stager.stage({"large": torch.ones(1_000_000), "small": torch.ones(2)})
        assert len(pickle.dumps(copied["small"].untyped_storage())) < 10_000
        assert copied["small"].untyped_storage().nbytes() == 8

    def test_attributes_of_a_tensor_are_copied(self, stager):
        weight = torch.ones(2)
        weight.kind = ["rows"]
        copied = stager.stage({"w": weight})["w"]
        assert copied.kind == ["rows"]
        assert copied.kind is not weight.kind
        weight.zero_()
        assert copied.tolist() == [1, 1]


class TestMemory:
    def test_of_a_part_of_a_storage_only_that_part_is_copied(self, stager):
        large = torch.ones(1_000_000)
        stager.stage({"a": large[1000:1100], "b": large[1200:1300]})
        assert len(stager._memory.buffer) <= 300 * 4 + 2 * 64

    def test_a_storage_is_copied_once(self, stager):
        weight = torch.ones(1000)
        stager.stage({"w": weight, "tied": weight, "views": [weight[n:] for n in range(50)]})
        assert len(stager._memory.buffer) <= 4000 + 64

    def test_is_kept_until_a_larger_state_comes(self, stager):
        places = [stager.stage({"w": torch.ones(size)})["w"].data_ptr() for size in (100, 50, 100)]
        assert places[0] == places[1] == places[2]
        copied = stager.stage({"w": torch.ones(200)})["w"]
        assert copied.tolist() == [1] * 200
        assert len(stager._memory.buffer) == 832

    def test_of_a_failed_save_is_used_again_and_released(self, tmp_path, monkeypatch):
        def fail(*_, **__):
            raise OSError("planned")

        made = []
        lend = patches._stagers

        def noted():
            made.append(lend())
            return made[-1]

        monkeypatch.setattr(patches, "_stagers", noted)
        state = {"w": torch.ones(1000)}
        with enable():
            dcp.async_save(state, checkpoint_id=tmp_path / "a").result()
            memory = made[0]._idle._memory.buffer
            with monkeypatch.context() as broken:
                broken.setattr(dcp.DefaultSavePlanner, "create_local_plan", fail)
                pending = dcp.async_save(state, checkpoint_id=tmp_path / "b")
                assert pending.exception() is not None
            assert made[0]._idle._memory.buffer is memory
            dcp.async_save(state, checkpoint_id=tmp_path / "b").result()
            assert made[0]._idle._memory.buffer is memory
            held = weakref.ref(made[0]._idle)
            del memory
        assert made[0]._idle is None
        assert held() is None

    def test_lies_as_the_tensors_will_in_the_file(self, stager):
        sizes = [64, 12, 4096, 300_032, 100, 3 * 4096, 128]
        state = {str(size): torch.ones(size, dtype=torch.uint8) for size in sizes}
        copied = stager.stage(state)
        first = min(value.data_ptr() for value in copied.values())
        places = {name: value.data_ptr() - first for name, value in copied.items()}
        assert first % 4096 == 0
        assert places == {
            "4096": 0,
            "12288": 4096,
            "64": 16384,
            "300032": 16448,
            "128": 316480,
            "12": 316608,
            "100": 316672,
        }

    def test_that_cannot_be_had_fails_the_call_and_no_later_one(self, tmp_path, monkeypatch):
        def refuse(*_):
            raise OSError(errno.ENOMEM, "no memory")

        state = {"w": torch.ones(1000)}
        with enable():
            with monkeypatch.context() as broken:
                broken.setattr(_native, "reserve", refuse)
                with pytest.raises(OSError, match="no memory"):
                    dcp.async_save(state, checkpoint_id=tmp_path / "a")
            dcp.async_save(state, checkpoint_id=tmp_path / "a").result()
        assert penstock.load(tmp_path / "a")["w"].tolist() == [1] * 1000

    def test_a_state_that_cannot_be_copied_gives_the_memory_back(self, tmp_path):
        class Uncopied:
            def __deepcopy__(self, _):
                raise TypeError("not copied")

        with enable() as _:
            weight = torch.ones(10)
            with pytest.raises(Exception, match="not copied"):
                dcp.async_save({"w": weight, "x": Uncopied()}, checkpoint_id=tmp_path / "a")
            dcp.async_save({"w": weight}, checkpoint_id=tmp_path / "a").result()
        assert penstock.load(tmp_path / "a")["w"].tolist() == [1] * 10
