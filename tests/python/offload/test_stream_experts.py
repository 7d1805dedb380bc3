"""`penstock.offload.stream` of mixtures of experts reads the experts that the routers chose."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mixtures import CONFIGS, SMALL, change_files, chosen_by, logits
from models import least, saved
from safetensors.torch import load_file, save_file

import penstock
from penstock import offload
from penstock.errors import CorruptCheckpointError, StateMismatchError, UnsupportedStateError
from penstock.io.files.extents import FileRange, JoinedExtent
from threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

transformers = pytest.importorskip("transformers")

ROUTED = [kind for kind in CONFIGS if kind != "llama 4"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Returns a function for a model in memory and its directory with several shards; cached."""
    made: dict[str, tuple[Any, Path]] = {}

    def model_of(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            directory = tmp_path_factory.mktemp("model")
            made[kind] = saved(directory, CONFIGS[kind](), "50KB"), directory
        return made[kind]

    return model_of


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 200, (2, 7), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_have_the_bits_of_those_of_the_model_in_memory(
    models: Any, kind: str, tokens: torch.Tensor
) -> None:
    """From a few experts in memory to all, for many tokens and for one."""
    model, directory = models(kind)
    smallest = least(directory)
    with pytest.raises(ValueError, match=f" {smallest} is the least"):
        offload.stream(directory, memory_bytes=smallest - 1)
    expected = [(batch, logits(model, batch)) for batch in (tokens, tokens[:1, :1], tokens)]
    for memory_bytes in (smallest, smallest + 60_000, 1 << 28):
        streamed = offload.stream(directory, memory_bytes=memory_bytes)
        for batch, outputs in expected:
            assert torch.equal(logits(streamed, batch), outputs)
        told = offload.report(streamed)
        weight_bytes = sum(one.nbytes for one in model.parameters())
        assert told.weight_bytes == weight_bytes
        assert (told.experts is not None) == (kind in ROUTED)
        expert_bytes = told.experts.memory_bytes if told.experts else 0
        assert told.resident_bytes + told.passing_bytes + expert_bytes <= memory_bytes


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("mixtral", "grouped_mm"),
        ("mixtral", "eager"),
        ("olmoe", "batched_mm"),
        ("gpt oss", "batched_mm"),
        ("gpt oss", "eager"),
    ],
)
def test_whatever_computes_the_experts(
    models: Any, kind: str, how: str, tokens: torch.Tensor
) -> None:
    model, directory = models(kind)
    streamed = offload.stream(directory, memory_bytes=least(directory))
    default = model.config._experts_implementation
    assert streamed.config._experts_implementation == default
    model.set_experts_implementation(how)
    streamed.set_experts_implementation(how)
    try:
        for batch in (tokens, tokens[:1, :1]):
            assert torch.equal(logits(streamed, batch), logits(model, batch))
    finally:
        model.set_experts_implementation(default)


def test_another_way_to_compute_experts_is_refused(models: Any, tokens: torch.Tensor) -> None:
    _, directory = models("mixtral")
    streamed = offload.stream(directory, memory_bytes=1 << 28)
    streamed.config._experts_implementation_internal = "sonicmoe"
    with pytest.raises(UnsupportedStateError, match=r"set_experts_implementation\("):
        streamed(tokens)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("qwen2", {"num_beams": 3, "do_sample": False}),
        ("qwen2", {"do_sample": False}),
        ("gpt oss", {"do_sample": True, "top_k": 20}),
        ("gpt oss", {"do_sample": False, "use_cache": False}),
    ],
)
def test_generate(models: Any, kind: str, how: dict[str, Any], tokens: torch.Tensor) -> None:
    model, directory = models(kind)
    streamed = offload.stream(directory, memory_bytes=least(directory) + 50_000)
    found = []
    for one in (model, streamed):
        torch.manual_seed(5)
        found.append(one.generate(tokens, max_new_tokens=4, **how))
    assert torch.equal(*found)


@settings(
    deadline=None,
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kind=st.sampled_from(ROUTED),
    extra_bytes=st.integers(0, 200_000),
    shapes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_any_budget_and_any_batches(
    models: Any, kind: str, extra_bytes: int, shapes: list[tuple[int, int]], seed: int
) -> None:
    model, directory = models(kind)
    streamed = offload.stream(directory, memory_bytes=least(directory) + extra_bytes)
    generator = torch.Generator().manual_seed(seed)
    for shape in shapes:
        batch = torch.randint(3, 200, shape, generator=generator)
        assert torch.equal(logits(streamed, batch), logits(model, batch))


def test_only_what_is_routed_is_read(tmp_path: Path) -> None:
    """For experts of real size, no more than their pages, unless they are in memory already."""
    sizes = {**SMALL, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**sizes, num_local_experts=8, dtype=torch.bfloat16)
    model = saved(tmp_path, config, "9MB", seed=2)
    expert_bytes = 3 * 512 * 1024 * 2
    streamed = offload.stream(tmp_path, memory_bytes=least(tmp_path))
    total = 0
    for seed in range(4):
        token = torch.randint(3, 200, (1, 1), generator=torch.Generator().manual_seed(seed))
        total += sum(chosen_by(model, token))
        assert torch.equal(logits(streamed, token), logits(model, token))
    told = offload.report(streamed).experts
    assert told is not None
    assert told.uses == 2 * total == 16
    assert told.routed_bytes == total * expert_bytes
    assert told.read_bytes <= 1.05 * told.routed_bytes
    whole = offload.stream(tmp_path, memory_bytes=1 << 28)
    for _ in range(3):
        logits(whole, token)
    told = offload.report(whole).experts
    assert told is not None
    assert (told.uses, told.hits) == (12, 8)
    assert told.read_bytes <= 1.05 * 2 * expert_bytes


def test_experts_that_are_used_often_stay(models: Any) -> None:
    """Also if memory is smaller than one pass needs."""
    model, directory = models("qwen2")
    smallest = least(directory)
    dense = offload.report(offload.stream(directory, memory_bytes=1 << 28)).resident_bytes
    slot = (
        offload.report(offload.stream(directory, memory_bytes=smallest)).experts.memory_bytes // 2
    )
    streamed = offload.stream(directory, memory_bytes=dense + 5 * slot)
    again = torch.full((1, 1), 9)
    needed = sum(chosen_by(model, again))
    assert needed == 8
    for _ in range(20):
        logits(streamed, again)
    told = offload.report(streamed).experts
    assert told is not None
    assert told.memory_bytes == 5 * slot
    assert told.uses == 20 * needed * 2
    # An LRU cache would have no hits.
    assert told.hits > told.uses // 8


def test_threads_share_a_model(models: Any) -> None:
    model, directory = models("mixtral")
    streamed = offload.stream(directory, memory_bytes=least(directory) + 60_000)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(10):
            batch = torch.randint(3, 200, (1, 4), generator=generator)
            assert torch.equal(logits(streamed, batch), logits(model, batch))

    on_threads(work, range(4))


@pytest.fixture
def copied(models: Any, tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that copies a model's files, to be changed."""

    def copy_of(kind: str) -> Path:
        for path in models(kind)[1].iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    return copy_of


@pytest.mark.parametrize("kind", ["mixtral", "gpt oss"])
def test_what_is_stored_as_another_type_is_converted(
    models: Any, copied: Any, kind: str, tokens: torch.Tensor
) -> None:
    model, _ = models(kind)
    directory = copied(kind)
    other = torch.float32 if model.dtype == torch.bfloat16 else torch.bfloat16
    change_files(
        directory, lambda content: content.update({k: v.to(other) for k, v in content.items()})
    )
    resident = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=model.dtype)
    streamed = offload.stream(directory, memory_bytes=1 << 28)
    assert streamed.dtype == model.dtype
    assert torch.equal(logits(streamed, tokens), logits(resident.eval(), tokens))


def test_tensors_at_odd_offsets_are_read(models: Any, copied: Any, tokens: torch.Tensor) -> None:
    """Other writers than the library produce such headers."""
    model, _ = models("mixtral")
    directory = copied("mixtral")
    for index, path in enumerate(sorted(directory.glob("*.safetensors"))):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = content[8 : 8 + length].rstrip() + b" " * (1 + index % 40)
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    for memory_bytes in (least(directory), 1 << 28):
        streamed = offload.stream(directory, memory_bytes=memory_bytes)
        assert torch.equal(logits(streamed, tokens), logits(model, tokens))


def test_experts_that_are_stored_transposed(
    models: Any, copied: Any, tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import conversion_mapping, core_model_loading

    model, _ = models("granite")
    directory = copied("granite")

    def turn(content: dict[str, torch.Tensor]) -> None:
        for name, one in content.items():
            if ".input_linear.weight" in name:
                content[name] = one.transpose(1, 2).contiguous()

    change_files(directory, turn)
    mapping = conversion_mapping.get_model_conversion_mapping

    def with_turn(*args: Any, **kwargs: Any) -> list[Any]:
        return [
            core_model_loading.WeightConverter(
                one.source_patterns, one.target_patterns, [core_model_loading.Transpose(1, 2)]
            )
            if any("input_linear" in pattern for pattern in one.source_patterns)
            else one
            for one in mapping(*args, **kwargs)
        ]

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", with_turn)
    streamed = offload.stream(directory, memory_bytes=1 << 28)
    assert torch.equal(logits(streamed, tokens), logits(model, tokens))


# ---- Sources of experts


@pytest.fixture(scope="module")
def checkpoints(
    models: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Any, Path, Path]]:
    """Returns a model in memory, its directory, and a checkpoint of its other weights."""
    made: dict[str, tuple[Any, Path, Path]] = {}

    def checkpoint_of(kind: str) -> tuple[Any, Path, Path]:
        if kind not in made:
            torch.manual_seed(11)
            directory = models(kind)[1]
            config = transformers.AutoConfig.from_pretrained(directory)
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
            path = tmp_path_factory.mktemp("run") / "a"
            penstock.save(path, {"model": model.state_dict()})
            made[kind] = model, directory, path
        return made[kind]

    return checkpoint_of


@pytest.mark.parametrize("kind", ["mixtral", "gpt oss"])
def test_experts_of_a_checkpoint(checkpoints: Any, kind: str, tokens: torch.Tensor) -> None:
    """The checkpoint holds all experts of a layer in one tensor."""
    model, directory, path = checkpoints(kind)
    smallest = least(directory, weights=path)
    with pytest.raises(ValueError, match=f" {smallest} is the least"):
        offload.stream(directory, weights=path, memory_bytes=smallest - 1)
    for memory_bytes in (smallest, 1 << 28):
        streamed = offload.stream(directory, weights=path, memory_bytes=memory_bytes)
        for batch in (tokens[:1, :1], tokens):
            assert torch.equal(logits(streamed, batch), logits(model, batch))
        assert offload.report(streamed).experts.uses > 0


def test_damage_of_an_expert_is_found_when_it_is_read(
    checkpoints: Any, tmp_path: Path, tokens: torch.Tensor
) -> None:
    """Before any use of it, each time, and only once the router has chosen it."""
    _, directory, path = checkpoints("mixtral")
    copy = tmp_path / "a"
    shutil.copytree(path, copy)
    name = "model.model.layers.1.mlp.experts.down_proj"
    one = next(one for one in penstock.inspect(copy).tensors if one.name == name)
    with (copy / one.file).open("r+b") as file:
        file.seek(one.end - 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    for memory_bytes in (least(directory, weights=path), 1 << 28):
        streamed = offload.stream(directory, weights=copy, memory_bytes=memory_bytes)
        seen: list[int] = []
        streamed.model.layers[1].mlp.experts.register_forward_hook(lambda *_: seen.append(1))  # noqa: B023
        for _ in range(2):
            with pytest.raises(CorruptCheckpointError) as caught:
                logits(streamed, tokens)
            assert (caught.value.tensor, caught.value.file) == (name, one.file)
            assert caught.value.is_proven
        assert not seen


def test_experts_that_ranks_have_saved_apart() -> None:
    """Their shards may end anywhere: within an expert, within a row."""
    places = (FileRange("a", 100, 40), FileRange("b", 7, 24), FileRange("c", 0, 32))
    joined = JoinedExtent("a", 100, (4, 3, 2), torch.float32, places=places)
    every = [(run.path, run.offset + at) for run in places for at in range(run.nbytes)]
    for index in range(4):
        part = joined.part(index * 24, (3, 2))
        assert part.shape == (3, 2)
        found = [(run.path, run.offset + at) for run in part.runs for at in range(run.nbytes)]
        assert found == every[index * 24 : index * 24 + 24]
        assert (part.path, part.offset) == found[0]


def test_experts_of_a_model_that_is_dispatched(
    models: Any, tmp_path: Path, tokens: torch.Tensor
) -> None:
    """Weights in memory stay there; weights on disk are read when a router chooses them."""
    accelerate = pytest.importorskip("accelerate")
    model, directory = models("mixtral")
    dispatched = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    streamed = offload.stream(
        accelerate.disk_offload(dispatched, str(tmp_path)), memory_bytes=1 << 28
    )
    for batch in (tokens[:1, :1], tokens):
        assert torch.equal(logits(streamed, batch), logits(model, batch))
    told = offload.report(streamed)
    assert told.experts is not None
    assert 0 < told.experts.read_bytes < told.weight_bytes


def test_models_with_experts_share_a_budget(models: Any, tokens: torch.Tensor) -> None:
    """The first model's memory is divided anew, including that of its experts."""
    (one, first), (other, second) = models("mixtral"), models("qwen2")
    room_bytes = least(first) + least(second) + 40_000
    budget = offload.Budget(room_bytes)
    streamed = offload.stream(first, memory_bytes=budget)
    assert torch.equal(logits(streamed, tokens), logits(one, tokens))
    alone = offload.report(streamed).experts.memory_bytes
    beside = offload.stream(second, memory_bytes=budget)
    for _ in range(2):
        assert torch.equal(logits(streamed, tokens), logits(one, tokens))
        assert torch.equal(logits(beside, tokens), logits(other, tokens))
    told = [offload.report(each) for each in (streamed, beside)]
    assert told[0].experts.memory_bytes < alone
    taken = [one.resident_bytes + one.passing_bytes + one.experts.memory_bytes for one in told]
    assert sum(taken) <= room_bytes
    with pytest.raises(ValueError, match="with the 2 that share it"):
        offload.stream(first, memory_bytes=budget)


# ---- Errors


def test_a_file_that_changes_under_a_running_model(copied: Any, tokens: torch.Tensor) -> None:
    """A file of experts only, so that reading them has to find the change."""
    directory = copied("mixtral")
    content: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        content.update(load_file(path))
        path.unlink()
    routed = {name: one for name, one in content.items() if ".experts." in name}
    others = {name: one for name, one in content.items() if name not in routed}
    path = directory / "experts.safetensors"
    save_file(others, directory / "others.safetensors")

    def cut() -> None:
        os.truncate(path, path.stat().st_size // 2)

    def touched() -> None:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\x00\x00\x80\x3f")

    for change in (cut, touched, path.unlink):
        save_file(routed, path)
        for budget in (least(directory), 1 << 28):
            save_file(routed, path)
            streamed = offload.stream(directory, memory_bytes=budget)
            logits(streamed, tokens)
            change()
            for _ in range(2):
                with pytest.raises(CorruptCheckpointError, match=r"has changed|is gone") as caught:
                    logits(streamed, tokens)
            assert caught.value.file == "experts.safetensors"
            assert re.search(r"\.experts\.\w+_proj \('.*\.w\d\.weight'\)", str(caught.value))
            assert "experts." in caught.value.tensor


def test_tensors_of_experts_that_are_missing_or_of_another_shape(copied: Any) -> None:
    directory = copied("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    for change, message in (
        (lambda one: one[:-1], "not have alike tensors for each part of"),
        (lambda one: one[:, :-1], "not have alike tensors for each part of"),
        (lambda _: None, "6 like .* 5 like|5 like .* 6 like"),
    ):
        directory = copied("mixtral")

        def apply(content: dict[str, torch.Tensor], change: Any = change) -> None:
            if name in content:
                one = change(content.pop(name))
                if one is not None:
                    content[name] = one.contiguous()

        change_files(directory, apply)
        with pytest.raises(StateMismatchError, match=message) as caught:
            offload.stream(directory, memory_bytes=1 << 28)
        assert caught.value.key == "model.layers.1.mlp.experts.gate_up_proj"


def test_weights_that_are_quantized_are_refused(copied: Any) -> None:
    directory = copied("mixtral")
    config = transformers.AutoConfig.from_pretrained(directory)
    config.quantization_config = {"quant_method": "fp8"}
    config.save_pretrained(directory)
    with pytest.raises(UnsupportedStateError, match="quantized"):
        offload.stream(directory, memory_bytes=1 << 28)
