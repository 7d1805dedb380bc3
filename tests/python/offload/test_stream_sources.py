"""The sources of a streamed model's weights: checkpoints, and foreign files."""

from __future__ import annotations

import gc
import importlib
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from models import CONFIGS, SMALL, saved
from safetensors.torch import save_file
from sharded import save_sharded
from towers import Tower

import penstock
from penstock import offload
from penstock.checkpoint.loading.opened import OpenCheckpoint
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    UnsupportedStateError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

ROOM_BYTES = 100_000


class Wide(torch.nn.Module):
    """Blocks whose tensors begin and end within the digest chunks of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(500, 500 + at) for at in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)[:, :500]
        return x


@pytest.fixture
def tower() -> Tower:
    torch.manual_seed(1)
    return Tower()


def same(streamed: Any, model: Any, passes: int = 2) -> bool:
    x = torch.randn(2, 32)
    with torch.inference_mode():
        return all(torch.equal(streamed(x), model(x)) for _ in range(passes))


# ---- Checkpoints


@pytest.mark.parametrize("at", ["", "model", "run.weights"])
def test_the_parameters_of_a_checkpoint_are_found_wherever_they_are(
    tmp_path: Path, tower: Tower, at: str
) -> None:
    state: dict[str, Any] = tower.state_dict()
    optimizer = torch.optim.AdamW(tower.parameters())
    tower(torch.randn(1, 32)).sum().backward()
    optimizer.step()
    state = dict(tower.state_dict())
    for part in reversed(at.split(".") if at else []):
        state = {part: state, "step": 7}
    penstock.save(tmp_path / "a", {**state, "optimizer": optimizer.state_dict()})
    streamed = offload.stream(Tower(), weights=tmp_path / "a", memory_bytes=ROOM_BYTES)
    assert offload.report(streamed).pass_bytes > 0
    assert same(streamed, tower)
    assert torch.equal(streamed.shift, tower.shift)
    named = offload.stream(Tower(), weights=tmp_path / "a", key=at, memory_bytes=ROOM_BYTES)
    assert same(named, tower)


def test_one_of_several_places_has_to_be_named(tmp_path: Path, tower: Tower) -> None:
    torch.manual_seed(2)
    other = Tower()
    state = {"model": tower.state_dict(), "average": other.state_dict()}
    penstock.save(tmp_path / "a", state)
    with pytest.raises(StateMismatchError, match=r"key='average', key='model'"):
        offload.stream(Tower(), weights=tmp_path / "a", memory_bytes=ROOM_BYTES)
    for key, model in (("model", tower), ("average", other)):
        streamed = offload.stream(Tower(), weights=tmp_path / "a", key=key, memory_bytes=ROOM_BYTES)
        assert same(streamed, model)


def test_a_checkpoint_that_lacks_parameters(tmp_path: Path, tower: Tower) -> None:
    state = dict(tower.state_dict())
    del state["head.weight"]
    penstock.save(tmp_path / "a", {"model": state})
    with pytest.raises(StateMismatchError, match=r"under 'model' lacks head\.weight$"):
        offload.stream(Tower(), weights=tmp_path / "a", memory_bytes=ROOM_BYTES)
    with pytest.raises(StateMismatchError, match=r"not in the files: head\.weight"):
        offload.stream(Tower(), weights=tmp_path / "a", key="model", memory_bytes=ROOM_BYTES)
    penstock.save(tmp_path / "b", {"step": 1, "other": torch.zeros(3)})
    with pytest.raises(StateMismatchError, match="no tensor with the name of a param"):
        offload.stream(Tower(), weights=tmp_path / "b", memory_bytes=ROOM_BYTES)


def test_of_a_store_the_newest_complete_step_is_taken(tmp_path: Path, tower: Tower) -> None:
    torch.manual_seed(2)
    store = penstock.CheckpointStore(tmp_path / "run")
    store.save(1, {"model": Tower().state_dict()})
    store.save(2, {"model": tower.state_dict()})
    (tmp_path / "run" / "step-0000000003").mkdir()
    streamed = offload.stream(Tower(), weights=tmp_path / "run", memory_bytes=ROOM_BYTES)
    assert same(streamed, tower)


def test_a_checkpoint_alone_does_not_say_what_model_it_is_of(tmp_path: Path, tower: Tower) -> None:
    store = penstock.CheckpointStore(tmp_path / "run")
    store.save(1, {"model": tower.state_dict()})
    for path in (tmp_path / "run", tmp_path / "run" / "step-0000000001"):
        with pytest.raises(ValueError, match=r"stream\(module, weights="):
            offload.stream(path, memory_bytes=ROOM_BYTES)
    save_file(dict(tower.named_parameters()), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is no checkpoint"):
        offload.stream(tower, weights=tmp_path, key="model", memory_bytes=ROOM_BYTES)


def test_views_and_ties_of_a_checkpoint(tmp_path: Path, tower: Tower) -> None:
    """Parameters may be any windows of one tensor, like fused ones."""
    state = dict(tower.state_dict())
    fused = torch.randn(80, 32)
    state["blocks.2.0.weight"], state["head.weight"] = fused[3:19], fused[40:45]
    tower.load_state_dict(state)
    penstock.save(tmp_path / "a", {"model": state, "fused": fused})
    streamed = offload.stream(Tower(), weights=tmp_path / "a", memory_bytes=ROOM_BYTES)
    assert same(streamed, tower)
    state["head.weight"] = fused.T[:5, :32]
    penstock.save(tmp_path / "b", {"model": state, "fused": fused})
    with pytest.raises(UnsupportedStateError, match=r"head\.weight' are scattered"):
        offload.stream(Tower(), weights=tmp_path / "b", memory_bytes=ROOM_BYTES)


@pytest.mark.parametrize("source", ["checkpoint", "files"])
def test_one_parameter_does_not_come_from_two_tensors(
    tmp_path: Path, tower: Tower, source: str
) -> None:
    """Files may hold a tied parameter twice, but not with different bytes."""

    def saved(state: dict[str, Any], name: str) -> Path:
        where = tmp_path / name
        if source == "checkpoint":
            penstock.save(where, {"model": state})
        else:
            where.mkdir()
            save_file({key: value.clone() for key, value in state.items()}, where / "w.safetensors")
        return where

    def tied() -> Tower:
        made = Tower()
        made.blocks[4][0].weight = made.blocks[0][0].weight
        return made

    state = {name: value.clone() for name, value in tower.state_dict().items()}
    with pytest.raises(StateMismatchError, match="are one parameter in the model"):
        offload.stream(tied(), weights=saved(state, "apart"), memory_bytes=ROOM_BYTES)
    state["blocks.4.0.weight"] = state["blocks.0.0.weight"].clone()
    streamed = offload.stream(tied(), weights=saved(state, "same"), memory_bytes=ROOM_BYTES)
    tower.load_state_dict(state)
    assert same(streamed, tower)


@pytest.mark.slow
def test_tensors_that_several_ranks_have_saved(jobs: Any, disk_path: Path, tower: Tower) -> None:
    """Each rank has some rows of each tensor, in a shard of its own, with uneven sizes."""
    for outcome in jobs.of(3).call(save_sharded, disk_path / "a", 0):
        assert outcome is None
    streamed = offload.stream(Tower(), weights=disk_path / "a", memory_bytes=ROOM_BYTES)
    assert offload.report(streamed).pass_bytes > 0
    assert same(streamed, tower)
    assert torch.equal(streamed.shift, tower.shift)
    shard = max((disk_path / "a").glob("shard-00001-*"), key=lambda one: one.stat().st_size)
    tensors = penstock.inspect(disk_path / "a").tensors
    piece = next(one for one in tensors if one.name == "model.blocks.3.0.weight").pieces[1]
    with shard.open("r+b") as file:
        file.seek(piece.begin)
        file.write(b"\xee")
    with pytest.raises(CorruptCheckpointError) as caught:
        # A rank's data is one chunk, of which the buffer is a part.
        offload.stream(Tower(), weights=disk_path / "a", memory_bytes=ROOM_BYTES)
    assert caught.value.file == shard.name
    assert "blocks.3.0.weight" in str(caught.value.tensor)


def test_tensors_that_ranks_have_cut_along_an_inner_dimension(jobs: Any, disk_path: Path) -> None:
    jobs.of(3).call(save_sharded, disk_path / "a", 1)
    with pytest.raises(UnsupportedStateError, match=r"weight' are scattered"):
        offload.stream(Tower(), weights=disk_path / "a", memory_bytes=ROOM_BYTES)
    penstock.save(disk_path / "b", penstock.load(disk_path / "a"))
    offload.stream(Tower(), weights=disk_path / "b", memory_bytes=ROOM_BYTES)


def test_files_of_a_checkpoint_stay_as_long_as_the_model(tmp_path: Path, tower: Tower) -> None:
    store = penstock.CheckpointStore(tmp_path / "run", keep_last=1)
    store.save(1, {"model": tower.state_dict()})
    streamed = offload.stream(Tower(), weights=tmp_path / "run", memory_bytes=ROOM_BYTES)
    first = tmp_path / "run" / "step-0000000001"
    for step in (2, 3):
        store.save(step, {"model": Tower().state_dict()})
        assert any(first.glob("shard-*"))
        assert same(streamed, tower)
    del streamed
    gc.collect()
    store.save(4, {"model": Tower().state_dict()})
    assert not any(first.glob("shard-*"))


# ---- Digests are checked at the first read


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Wide, Path]:
    torch.manual_seed(1)
    model = Wide()
    path = tmp_path_factory.mktemp("wide") / "a"
    penstock.save(path, {"before": torch.randn(300_000), "model": model.state_dict()})
    return model, path


def run(path: Path, **how: Any) -> torch.Tensor:
    torch.manual_seed(4)
    streamed = offload.stream(Wide(), weights=path, memory_bytes=3 << 20, **how)
    with torch.inference_mode():
        return streamed(torch.ones(2, 500))


def test_damage_is_found_before_anything_is_computed_of_it(
    tmp_path: Path, wide: tuple[Wide, Path]
) -> None:
    model, path = wide
    with torch.inference_mode():
        assert torch.equal(run(path), model(torch.ones(2, 500)))
    tensors = {one.name: one for one in penstock.inspect(path).tensors}
    for name in ("model.blocks.0.weight", "model.blocks.3.weight", "model.blocks.5.bias"):
        for at in ("begin", "middle", "end"):
            copy = tmp_path / f"{name}-{at}"
            shutil.copytree(path, copy)
            one = tensors[name]
            offset = {"begin": one.begin, "middle": (one.begin + one.end) // 2}
            with (copy / one.file).open("r+b") as file:
                file.seek(offset.get(at, one.end - 1))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
            seen: list[torch.Tensor] = []
            streamed = offload.stream(Wide(), weights=copy, memory_bytes=3 << 20)
            number = int(name.split(".")[2])
            streamed.blocks[number].register_forward_hook(lambda *_: seen.append(1))  # noqa: B023
            for _ in range(2):
                with (
                    pytest.raises(CorruptCheckpointError) as caught,
                    torch.inference_mode(),
                ):
                    streamed(torch.ones(2, 500))
                assert (caught.value.tensor, caught.value.file) == (name, one.file)
                assert caught.value.is_proven
            assert not seen


def test_what_lies_around_is_there_of_few_units_at_a_time(wide: tuple[Wide, Path]) -> None:
    """All weights are read ahead if there is room, and all digests are checked."""
    model, path = wide
    streamed = offload.stream(Wide(), weights=path, memory_bytes=1 << 30)
    told = offload.report(streamed)
    # All weights, and surrounding bytes of some.
    assert told.read_bytes > told.weight_bytes
    for _ in range(2):
        with torch.inference_mode():
            assert torch.equal(streamed(torch.ones(2, 500)), model(torch.ones(2, 500)))
    assert offload.report(streamed).read_bytes > told.read_bytes


def test_a_buffer_is_compared_with_its_digest(tmp_path: Path, tower: Tower) -> None:
    penstock.save(tmp_path / "a", tower.state_dict())
    one = next(one for one in penstock.inspect(tmp_path / "a").tensors if one.name == "shift")
    with (tmp_path / "a" / one.file).open("r+b") as file:
        file.seek(one.begin)
        file.write(b"\xee")
    with pytest.raises(CorruptCheckpointError, match="shift"):
        offload.stream(Tower(), weights=tmp_path / "a", memory_bytes=ROOM_BYTES)


def test_bytes_that_are_wrong_are_read_once_more(
    monkeypatch: pytest.MonkeyPatch, wide: tuple[Wide, Path]
) -> None:
    """The page cache may be wrong though the device is right."""
    model, path = wide
    check = OpenCheckpoint.check
    found: list[int] = []

    def check_once_damaged(self: Any, file: str, start: int, memories: Any, wanted: Any) -> None:
        if start not in found:
            found.append(start)
            memories[1].owner[100] ^= 1
        check(self, file, start, memories, wanted)

    monkeypatch.setattr(OpenCheckpoint, "check", check_once_damaged)
    with torch.inference_mode():
        expected = model(torch.ones(2, 500))
        for direct in ("auto", "off"):
            found.clear()
            assert torch.equal(run(path, io=offload.TensorIO(direct=direct)), expected)
            assert len(found) >= 3


def test_a_checkpoint_that_changes_under_a_running_model(
    tmp_path: Path, wide: tuple[Wide, Path]
) -> None:
    model, path = wide
    copy = tmp_path / "a"
    shutil.copytree(path, copy)
    streamed = offload.stream(Wide(), weights=copy, memory_bytes=3 << 20)
    x = torch.ones(2, 500)
    with torch.inference_mode():
        assert torch.equal(streamed(x), model(x))
        shard = next(copy.glob("shard-*"))
        os.utime(shard, ns=(1, 1))
        with pytest.raises(CorruptCheckpointError, match="has changed"):
            streamed(x)


# ---- Models dispatched by accelerate


LAYERS = 6


@pytest.fixture(scope="module", params=["llama, tied", "gpt2"])
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns a directory, and the model in memory."""
    directory = tmp_path_factory.mktemp("saved")
    return directory, saved(directory, CONFIGS[request.param]())


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(1, 19).view(2, 9)).logits


def partly(model: Any, folder: Path) -> Any:
    """Dispatches a model to memory and disk."""
    blocks = "model.layers" if hasattr(model, "model") else "transformer.h"
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers()]
    where = {name: "cpu" for name in names if not name.startswith(blocks)}
    where |= {f"{blocks}.{at}": "cpu" if at < 2 else "disk" for at in range(LAYERS)}
    return accelerate.dispatch_model(model, where, offload_dir=folder)


DISPATCHED: dict[str, Any] = {
    "transformers": lambda path, folder: transformers.AutoModelForCausalLM.from_pretrained(
        path, device_map={"": "disk"}, offload_folder=folder
    ),
    "disk": lambda path, folder: accelerate.disk_offload(of(path), folder),
    "disk, buffers too": lambda path, folder: accelerate.disk_offload(
        of(path), folder, offload_buffers=True
    ),
    "partly": lambda path, folder: partly(of(path), folder),
    "memory": lambda path, folder: accelerate.cpu_offload(of(path)),
}


def of(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("how", DISPATCHED)
def test_a_model_that_was_dispatched_is_taken_over(tmp_path: Path, named: Any, how: str) -> None:
    directory, model = named
    dispatched = DISPATCHED[how](directory, tmp_path)
    weight_bytes = sum(one.nbytes for one in model.parameters())
    with pytest.raises(ValueError, match="least that works") as caught:
        offload.stream(dispatched, memory_bytes=1)
    memory_bytes = int(re.findall(r"(\d+) is the least", str(caught.value))[0])
    with pytest.raises(ValueError, match="least that works"):
        offload.stream(dispatched, memory_bytes=memory_bytes - 1)
    # The refused model is unchanged.
    assert torch.equal(logits(dispatched), logits(model))
    streamed = offload.stream(dispatched, memory_bytes=memory_bytes)
    told = offload.report(streamed)
    assert told.weight_bytes == weight_bytes
    assert told.resident_bytes + told.passing_bytes <= memory_bytes
    assert (told.pass_bytes > 0) == (how != "memory")
    for _ in range(2):
        assert torch.equal(logits(streamed), logits(model))
    assert not any(hasattr(one, "_hf_hook") for one in streamed.modules())


def test_files_of_a_dispatched_model_that_are_gone_or_another(tmp_path: Path, named: Any) -> None:
    directory, _ = named
    dispatched = accelerate.disk_offload(of(directory), tmp_path)
    file = max(tmp_path.glob("*.dat"), key=lambda one: one.stat().st_size)
    file.write_bytes(b"1234")
    with pytest.raises(CorruptCheckpointError, match="it has 4 bytes") as caught:
        offload.stream(dispatched, memory_bytes=1 << 20)
    assert (caught.value.file, f"{caught.value.tensor}.dat") == (file.name, file.name)
    file.unlink()
    with pytest.raises(CheckpointNotFoundError, match="dispatch it again"):
        offload.stream(dispatched, memory_bytes=1 << 20)


def test_a_directory_says_what_a_checkpoint_is_of(tmp_path: Path, named: Any) -> None:
    directory, model = named
    other = of(directory)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    penstock.save(tmp_path / "a", {"model": other.state_dict(), "step": 3})
    streamed = offload.stream(directory, weights=tmp_path / "a", memory_bytes=800_000)
    assert torch.equal(logits(streamed), logits(other))
    shutil.copy(directory / "config.json", tmp_path / "a")
    streamed = offload.stream(tmp_path / "a", memory_bytes=800_000)
    assert torch.equal(logits(streamed), logits(other))
    assert not torch.equal(logits(streamed), logits(model))


# ---- Tensors stored in another form than in the model


@pytest.fixture
def fused(tmp_path: Path) -> Iterator[tuple[Path, list[Any]]]:
    """Saves fused, transposed and permuted tensors; yields them with transformers' conversions."""
    core = importlib.import_module("transformers.core_model_loading")
    mappings = importlib.import_module("transformers.conversion_mapping")
    config = transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, attention_bias=True)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    for at in range(LAYERS):
        attention, mlp = f"model.layers.{at}.self_attn", f"model.layers.{at}.mlp"
        for kind in ("weight", "bias"):
            own = [state.pop(f"{attention}.{one}_proj.{kind}") for one in "qkv"]
            state[f"{attention}.qkv.{kind}"] = torch.cat(own)
        state[f"{mlp}.up.weight"] = state.pop(f"{mlp}.up_proj.weight").T.contiguous()
        gate = state.pop(f"{mlp}.gate_proj.weight").to(torch.bfloat16)
        state[f"{mlp}.gate.weight"] = gate.view(96, 1, 2, 8, 4)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    converters = [
        core.WeightConverter(
            r"self_attn\.qkv",
            [f"self_attn.{one}_proj" for one in "qkv"],
            [core.Chunk(dim=0), core.PermuteForRope(permute_layer_names=["q_proj", "k_proj"])],
        ),
        core.WeightConverter(r"mlp\.up\.", "mlp.up_proj.", [core.Transpose(0, 1)]),
        core.WeightConverter(
            r"mlp\.gate\.weight", "mlp.gate_proj.weight", [core.Conv3dToLinear(1, (2, 8, 4))]
        ),
    ]
    mappings.register_checkpoint_conversion_mapping("LlamaForCausalLM", converters)
    yield tmp_path, converters
    mappings._checkpoint_conversion_mapping_cache.pop("LlamaForCausalLM")
    mappings.USER_REGISTERED_MAPPINGS.discard("LlamaForCausalLM")


def test_tensors_are_rearranged_as_they_come(fused: tuple[Path, list[Any]]) -> None:
    path, converters = fused
    model = of(path)
    streamed = offload.stream(path, memory_bytes=500_000)
    told = offload.report(streamed)
    assert told.pass_bytes > 0
    assert told.resident_bytes + told.passing_bytes <= 500_000
    for _ in range(2):
        assert torch.equal(logits(streamed), logits(model))
    # Unknown conversions are refused by name.
    core = importlib.import_module("transformers.core_model_loading")
    converters[1].operations = [core.Interleave(dim=0)]
    with pytest.raises(UnsupportedStateError, match="up_proj"):
        offload.stream(path, memory_bytes=500_000)
