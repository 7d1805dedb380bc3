"""`penstock.offload.stream`: the same outputs as of the model in memory, and its errors."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import CONFIGS, SMALL, least, saved
from safetensors.torch import save_file
from towers import Tower, copy_of

from penstock import offload
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    UnsupportedStateError,
)
from penstock.offload.streaming.weights.memory import Ring, RingRange
from threads import on_threads

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_have_the_bits_of_those_of_the_model_in_memory(
    tmp_path: Path, kind: str, tokens: torch.Tensor
) -> None:
    """With any number of resident weights, in several passes."""
    model = saved(tmp_path, CONFIGS[kind]())
    smallest = least(tmp_path)
    with torch.inference_mode():
        expected = model(tokens).logits
    for memory_bytes in (smallest, smallest + 50_000, 2 * smallest, 1 << 30):
        streamed = offload.stream(tmp_path, memory_bytes=memory_bytes)
        told = offload.report(streamed)
        assert told.uses == 0
        assert told.read_bytes <= told.resident_bytes + told.passing_bytes
        assert told.resident_bytes + told.passing_bytes <= memory_bytes
        with torch.inference_mode():
            for _ in range(3):
                assert torch.equal(streamed(tokens).logits, expected)
        told = offload.report(streamed)
        assert told.weight_bytes == sum(one.nbytes for one in model.parameters())
        if memory_bytes == 1 << 30:
            assert told.pass_bytes == 0
            assert told.read_bytes < 1.5 * told.weight_bytes
        else:
            assert told.pass_bytes > 0
            # Three passes, and the read-ahead that other weights have replaced.
            most_bytes = told.weight_bytes * 1.5 + 3 * told.pass_bytes + told.passing_bytes
            assert told.read_bytes <= most_bytes


@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_p": 0.9},
        {"do_sample": False, "use_cache": False},
    ],
)
def test_generate(tmp_path: Path, how: dict[str, Any], tokens: torch.Tensor) -> None:
    model = saved(tmp_path, CONFIGS["llama"]())
    streamed = offload.stream(str(tmp_path), memory_bytes=2 * least(tmp_path))
    found = []
    for one in (model, streamed):
        torch.manual_seed(5)
        found.append(one.generate(tokens, max_new_tokens=6, **how))
    assert torch.equal(*found)


def test_smaller_blocks_need_less_memory_for_reads(tmp_path: Path, tokens: torch.Tensor) -> None:
    # Matrices of many pages, as units begin at pages.
    sizes = SMALL | {"hidden_size": 256, "intermediate_size": 512}
    model = saved(tmp_path, transformers.LlamaConfig(**sizes))
    with torch.inference_mode():
        expected = model(tokens).logits
    memory_bytes = 4 * least(tmp_path)
    passing = []
    for blocks in (None, ["*.self_attn", "*.mlp"], ["*_proj"]):
        streamed = offload.stream(tmp_path, memory_bytes=memory_bytes, blocks=blocks)
        with torch.inference_mode():
            for _ in range(3):
                assert torch.equal(streamed(tokens).logits, expected)
        told = offload.report(streamed)
        assert told.resident_bytes + told.passing_bytes <= memory_bytes
        passing.append(told.pass_bytes)
    assert passing[0] > passing[1] > passing[2] > 0
    with pytest.raises(ValueError, match=r"no module '\*_prok'"):
        offload.stream(tmp_path, memory_bytes=memory_bytes, blocks=["*_prok"])


def test_a_pattern_names_modules_below_the_model(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    x = torch.randn(3, 64)
    expected = model(x)
    memory_bytes = 4 * 24_576
    streamed = offload.stream(model, weights=tmp_path, memory_bytes=memory_bytes, blocks=["*"])
    with torch.inference_mode():
        assert torch.equal(streamed(x), expected)
    assert offload.report(streamed).uses == 6


GUESSES: dict[str, Any] = {
    "none": lambda _: {},
    "by the text before": lambda _: {"prompt_lookup_num_tokens": 4},
    "by a draft that guesses right": lambda draft: {"assistant_model": draft},
}


@pytest.mark.parametrize("kind", ["llama", "llama, tied"])
def test_a_pass_over_the_weights_serves_all_tokens_that_were_guessed(
    tmp_path: Path, kind: str
) -> None:
    """Greedy decoding gives the tokens of the model in memory, with fewer passes and bytes."""
    config = CONFIGS[kind]()
    config.eos_token_id, config.dtype = None, torch.float32
    model = saved(tmp_path, config)
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    prompt = torch.tensor([[5, 6, 7, 8] * 3])
    expected = model.generate(prompt, **how)
    # As a draft it knows the answer, however small the chance that it gives it.
    model.generation_config.assistant_confidence_threshold = 0.0
    passes, read_bytes = {}, {}
    for name, guess in GUESSES.items():
        streamed = offload.stream(tmp_path, memory_bytes=2 * least(tmp_path))
        with torch.inference_mode():
            # Reads the weights that stay.
            streamed(prompt)
        before = offload.report(streamed)
        assert before.pass_bytes > 0
        assert torch.equal(streamed.generate(prompt, **how, **guess(model)), expected)
        told = offload.report(streamed)
        passes[name] = told.passes - before.passes
        read_bytes[name] = told.read_bytes - before.read_bytes
        # The last pass also reads ahead; the first found what another one had read ahead.
        assert abs(read_bytes[name] - passes[name] * told.pass_bytes) <= told.passing_bytes
    assert passes["none"] == 24
    # Weights of chance go round and round, which is what the text before foretells.
    assert passes["by the text before"] <= 16
    assert passes["by a draft that guesses right"] <= 3
    assert read_bytes["none"] > read_bytes["by the text before"]


@pytest.fixture
def tower(tmp_path: Path) -> tuple[Tower, Path]:
    torch.manual_seed(1)
    model = Tower()
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    return model, tmp_path


def test_a_module_of_ones_own_in_any_order_of_its_blocks(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=100_000)
    assert offload.report(streamed).pass_bytes > 0
    x = torch.randn(3, 32)
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for _ in range(40):
            order = tuple(torch.randint(5, (4,), generator=generator).tolist())
            assert torch.equal(streamed(x, order), model(x, order))


def test_threads_share_a_model(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=100_000)
    x = torch.randn(3, 32)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.inference_mode():
            for _ in range(30):
                order = tuple(torch.randint(5, (4,), generator=generator).tolist())
                assert torch.equal(streamed(x, order), model(x, order))

    on_threads(work, range(4))


def test_what_is_stored_as_another_type_is_converted(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    half = {name: one.to(torch.bfloat16) for name, one in model.named_parameters()}
    save_file(half, directory / "model.safetensors")
    model.load_state_dict(half, strict=False)
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=150_000)
    x = torch.randn(3, 32)
    with torch.inference_mode():
        assert torch.equal(streamed(x), model(x))


def test_buffers_that_are_stored_are_read(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    save_file(model.state_dict(), directory / "model.safetensors")
    # The new model's buffer has another value.
    streamed = offload.stream(Tower(), weights=directory, memory_bytes=100_000)
    x = torch.randn(3, 32)
    assert torch.equal(streamed.shift, model.shift)
    with torch.inference_mode():
        assert torch.equal(streamed(x), model(x))
    other = Tower()
    other.shift = torch.zeros(31)
    with pytest.raises(StateMismatchError, match="'shift' is of another shape"):
        offload.stream(other, weights=directory, memory_bytes=100_000)


def test_tensors_at_odd_offsets_are_read(tower: tuple[Tower, Path]) -> None:
    """Other writers than the library produce such headers."""
    model, directory = tower
    path = directory / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip() + b" " * 3
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=100_000)
    x = torch.randn(3, 32)
    with torch.inference_mode():
        assert torch.equal(streamed(x), model(x))


def test_hooks_of_others_find_the_weights_and_parameters_have_their_shapes(
    tower: tuple[Tower, Path],
) -> None:
    model, directory = tower
    other = copy_of(model)
    seen = []
    other.blocks[1].register_forward_pre_hook(lambda one, _: seen.append(one[0].weight.clone()))
    other.blocks[1].register_forward_hook(lambda one, *_: seen.append(one[1].bias.clone()))
    streamed = offload.stream(other, weights=directory, memory_bytes=100_000)
    shapes = {name: one.shape for name, one in model.named_parameters()}
    assert {name: one.shape for name, one in streamed.named_parameters()} == shapes
    with torch.inference_mode():
        streamed(torch.randn(1, 32), (1,))
    assert torch.equal(seen[0], model.blocks[1][0].weight)
    assert torch.equal(seen[1], model.blocks[1][1].bias)


def test_a_block_that_raises_is_let_go_of(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=100_000)
    for _ in range(20):
        with pytest.raises(RuntimeError):
            streamed(torch.randn(1, 31))
    x = torch.randn(1, 32)
    assert torch.equal(streamed(x), model(x))


def test_it_stays_where_and_what_it_is(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=100_000)
    assert streamed.to("cpu") is streamed
    for change in (streamed.half, streamed.blocks[1].bfloat16, lambda: streamed.to("meta")):
        with pytest.raises(UnsupportedStateError, match="stays on the CPU"):
            change()
    with pytest.raises(ValueError, match="has not made it"):
        offload.report(model)


def test_a_block_that_is_called_within_another_one_is_an_error_where_there_is_no_room(
    tower: tuple[Tower, Path],
) -> None:
    model, directory = tower
    other = copy_of(model)
    other.blocks[3].register_forward_hook(lambda _, args, out: out + other.blocks[1](args[0]))
    streamed = offload.stream(other, weights=directory, memory_bytes=70_000)
    for _ in range(2):
        with pytest.raises(UnsupportedStateError, match=r"'blocks\.1' is called while"):
            streamed(torch.randn(1, 32), (3,))
    x = torch.randn(1, 32)
    assert torch.equal(streamed(x, (1, 0)), model(x, (1, 0)))


# ---- Errors


def test_too_little_memory(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    with pytest.raises(ValueError, match=r"'blocks.1' takes \d+ .* \d+ is the least that works"):
        offload.stream(model, weights=directory, memory_bytes=50_000)
    for wrong in (0, -1, 1.5, "4GB"):
        with pytest.raises((ValueError, TypeError), match="memory_bytes"):
            offload.stream(model, weights=directory, memory_bytes=wrong)  # type: ignore[arg-type]


def test_files_that_do_not_fit_the_model(tower: tuple[Tower, Path], tmp_path: Path) -> None:
    model, directory = tower
    with pytest.raises(TypeError, match="weights="):
        offload.stream(model, memory_bytes=1 << 20)
    with pytest.raises(ValueError, match="no module 'block'"):
        offload.stream(model, weights=directory, memory_bytes=1 << 20, blocks=["block"])
    held = dict(model.named_parameters())
    for change, message in (
        ({"head.weight": None}, "not in the files: head.weight"),
        ({"head.weight": torch.zeros(5, 33)}, "another shape in the files: head.weight"),
    ):
        content = {name: one for name, one in {**held, **change}.items() if one is not None}
        save_file(content, directory / "model.safetensors")
        with pytest.raises(StateMismatchError, match=message):
            offload.stream(model, weights=directory, memory_bytes=1 << 20)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError, match="no safetensors"):
        offload.stream(model, weights=tmp_path / "empty", memory_bytes=1 << 20)


def test_parameters_that_are_computed_of_several_tensors_are_refused(tmp_path: Path) -> None:
    config = transformers.OlmoHybridConfig(**SMALL)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedStateError, match=r"conv1d\..* is computed from"):
        offload.stream(tmp_path, memory_bytes=1 << 30)


def entry(**changes: Any) -> bytes:
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    text = json.dumps({"a": {key: value for key, value in one.items() if value is not None}})
    return len(text).to_bytes(8, "little") + text.encode() + bytes(8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short to hold a header"),
        (b"1234", "too short to hold a header"),
        ((1 << 40).to_bytes(8, "little"), "header claims 1099511627776 bytes"),
        ((5).to_bytes(8, "little") + b"nope!", "no JSON"),
        ((2).to_bytes(8, "little") + b"[]", "none of safetensors: .* expected an object"),
        ((3).to_bytes(8, "little") + b"\xff{}", "header"),
        (entry(dtype=None), "missing field `dtype`"),
        (entry(data_offsets=[0]), "expected a tuple of size 2"),
        (entry(data_offsets=[-8, 0]), "integer `-8`"),
        (entry(data_offsets=[0, 8.0]), r"floating point `8\.0`"),
        (entry(data_offsets=[0, 1 << 70], shape=[1 << 68]), "floating point"),
        (entry(shape=[3]), r"\"a\" has 8 bytes, its \[3\] elements of F32 take 96 bits"),
        (entry(shape=[True, 2]), "boolean `true`"),
        (entry(dtype=["F32"]), "expected the name of a type"),
        (entry()[:-1], "accounts for 8 of 7 bytes"),
    ],
)
def test_headers_that_make_no_sense(
    tower: tuple[Tower, Path], content: bytes, message: str
) -> None:
    model, directory = tower
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match=message) as caught:
        offload.stream(model, weights=directory, memory_bytes=1 << 20)
    assert caught.value.file == "model.safetensors"


def test_a_type_that_is_not_known_is_no_damage(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    (directory / "model.safetensors").write_bytes(entry(dtype="F33"))
    with pytest.raises(UnsupportedStateError, match="'a' has elements of the type F33"):
        offload.stream(model, weights=directory, memory_bytes=1 << 20)


def test_a_tensor_that_is_in_two_files(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    save_file({"scale": torch.zeros(())}, directory / "other.safetensors")
    with pytest.raises(CorruptCheckpointError, match="'scale' is in"):
        offload.stream(model, weights=directory, memory_bytes=1 << 20)


def test_a_file_that_changes_under_a_running_model(tower: tuple[Tower, Path]) -> None:
    """After any change of the file, no output is computed from wrong bytes."""
    model, directory = tower
    path = directory / "model.safetensors"
    content = path.read_bytes()
    x = torch.randn(2, 32)

    def touched() -> None:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\x00\x00\x80\x3f")

    def cut() -> None:
        os.truncate(path, len(content) // 2)

    def replaced() -> None:
        path.unlink()
        path.write_bytes(content)

    for change in (touched, cut, replaced, path.unlink):
        path.write_bytes(content)
        streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=100_000)
        with torch.inference_mode():
            assert torch.equal(streamed(x), model(x))
            change()
            for _ in range(2):
                with pytest.raises(CorruptCheckpointError, match=r"has changed|is gone") as caught:
                    streamed(x)
        assert caught.value.tensor in dict(model.named_parameters())
        assert caught.value.file == "model.safetensors"


# ---- The ring of buffers


@given(
    size=st.integers(1, 100),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 60)), max_size=60),
)
def test_no_two_claims_on_a_ring_overlap(size: int, steps: list[tuple[bool, int]]) -> None:
    ring, held = Ring(size), list[RingRange]()
    for takes, number in steps:
        if takes:
            claim = ring.take(number)
            if claim is None:
                assert held or number > size
                continue
            assert 0 <= claim.begin <= claim.begin + claim.nbytes <= size
            for other in held:
                assert (
                    claim.begin + claim.nbytes <= other.begin
                    or other.begin + other.nbytes <= claim.begin
                )
            held.append(claim)
        elif held:
            ring.give_back(held.pop(number % len(held)))
