"""A streamed model beside others: hooks, calls from outside, and models that share a budget."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import SMALL
from safetensors.torch import save_file
from towers import Tower, copy_of

import penstock
from penstock import offload
from penstock.errors import UnsupportedStateError
from penstock.offload.streaming.budget import divided
from penstock.offload.streaming.weights.shares import Needs
from threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

transformers = pytest.importorskip("transformers")

HANG_SECONDS = 120
ROOM_BYTES = 100_000


@pytest.fixture
def tower(tmp_path: Path) -> tuple[Tower, Path]:
    torch.manual_seed(1)
    model = Tower()
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    return model, tmp_path


def streamed_of(tower: tuple[Tower, Path], memory_bytes: Any = ROOM_BYTES) -> Any:
    return offload.stream(copy_of(tower[0]), weights=tower[1], memory_bytes=memory_bytes)


@pytest.fixture(scope="module")
def llamas(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Path]]:
    """Saves two models of one vocabulary; returns each in memory with its directory."""
    found = []
    for seed, layers in ((7, 6), (8, 2)):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": layers})
        directory = tmp_path_factory.mktemp("llama")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory)
        found.append((model.eval(), directory))
    return found


@pytest.fixture(scope="module")
def streamed_llamas(llamas: list[tuple[Any, Path]]) -> list[Any]:
    return [
        offload.stream(path, memory_bytes=sum(one.nbytes for one in model.parameters()) * 2 // 3)
        for model, path in llamas
    ]


# ---- Generating


def padded() -> dict[str, torch.Tensor]:
    """Returns a batch in which one row is shorter, padded on the left."""
    tokens = torch.randint(1, 300, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    tokens[1, :4], mask[1, :4] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def one_row() -> dict[str, torch.Tensor]:
    return {name: one[:1] for name, one in padded().items()}


STRATEGIES: dict[str, Any] = {
    "greedy, padded": lambda _: {**padded()},
    "sampling": lambda _: {**padded(), "do_sample": True, "top_k": 20, "temperature": 0.7},
    "beams": lambda _: {**padded(), "num_beams": 3},
    "beams of several": lambda _: {**padded(), "num_beams": 4, "num_return_sequences": 2},
    "sampled beams": lambda _: {**padded(), "num_beams": 2, "do_sample": True},
    "assisted": lambda other: {**one_row(), "assistant_model": other},
    "assisted, sampling": lambda other: {
        **one_row(),
        "assistant_model": other,
        "do_sample": True,
    },
    "by the prompt": lambda _: {**one_row(), "prompt_lookup_num_tokens": 2},
    "by its first blocks": lambda _: {**one_row(), "assistant_early_exit": 2},
    "a cache of fixed size": lambda _: {**padded(), "cache_implementation": "static"},
    "from nothing": lambda _: {"bos_token_id": 1},
}


@pytest.mark.parametrize("how", STRATEGIES)
def test_what_is_generated_is_what_the_models_in_memory_generate(
    llamas: list[tuple[Any, Path]], streamed_llamas: list[Any], how: str
) -> None:
    found = []
    for model, other in ([one for one, _ in llamas], streamed_llamas):
        torch.manual_seed(5)
        arguments = {"do_sample": False, **STRATEGIES[how](other)}
        found.append(model.generate(max_new_tokens=8, **arguments))
    assert torch.equal(*found)


def test_a_streamed_model_says_what_it_is(
    llamas: list[tuple[Any, Path]], streamed_llamas: list[Any]
) -> None:
    model, streamed = llamas[0][0], streamed_llamas[0]
    for name in ("device", "dtype"):
        assert getattr(streamed, name) == getattr(model, name)
    assert streamed.num_parameters() == model.num_parameters()
    assert "in storage" in repr(list(streamed.parameters()))


# ---- Modes and hooks


def test_whatever_mode_it_is_called_in_next(tower: tuple[Tower, Path]) -> None:
    model, x = tower[0], torch.randn(2, 32)
    for memory_bytes in (ROOM_BYTES, 1 << 20):
        for first in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            streamed = streamed_of(tower, memory_bytes)
            for mode in (first, torch.enable_grad, torch.inference_mode, torch.no_grad):
                with mode():
                    assert torch.equal(streamed(x), model(x))


def test_gradients_are_refused(tower: tuple[Tower, Path]) -> None:
    streamed = streamed_of(tower)
    x = torch.randn(2, 32, requires_grad=True)
    with pytest.raises(UnsupportedStateError, match="has no gradients"):
        streamed(x)
    with pytest.raises(UnsupportedStateError, match="has no gradients"):
        streamed.blocks[0](input=x)
    with torch.no_grad():
        assert torch.equal(streamed(x), tower[0](x))
    with pytest.raises(UnsupportedStateError, match="cannot be trained"):
        streamed.requires_grad_()
    assert streamed.requires_grad_(False) is streamed


def test_hooks_of_others_run_in_their_order(tower: tuple[Tower, Path]) -> None:
    """Before and after, with and without keywords, registered first or last."""
    model, x = copy_of(tower[0]), torch.randn(2, 32)
    other = copy_of(tower[0])

    def put_on(one: Tower, at: int) -> None:
        one.blocks[at].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        one.blocks[at].register_forward_pre_hook(
            lambda block, args, kwargs: ((args[0] * block[0].weight.sum(),), kwargs),
            with_kwargs=True,
        )
        one.blocks[at].register_forward_hook(lambda block, _, out: out + block[1].bias)
        one.blocks[at].register_forward_hook(
            lambda block, args, kwargs, out: out * block[1].weight.mean(), with_kwargs=True
        )

    put_on(model, 0)
    put_on(other, 0)
    streamed = offload.stream(other, weights=tower[1], memory_bytes=ROOM_BYTES)
    put_on(model, 1)
    put_on(streamed, 1)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(streamed(x), model(x))


def test_a_hook_that_runs_before_the_weights_are_there_hears_it(
    tower: tuple[Tower, Path],
) -> None:
    streamed = streamed_of(tower)
    seen = streamed.blocks[1].register_forward_pre_hook(
        lambda block, _: block[0].weight.sum(), prepend=True
    )
    with torch.no_grad():
        with pytest.raises(UnsupportedStateError, match=r"'blocks\.1\.0\.weight' is in"):
            streamed(torch.randn(1, 32), (1,))
        seen.remove()
        x = torch.randn(1, 32)
        assert torch.equal(streamed(x), tower[0](x))


def test_it_can_be_compiled(tower: tuple[Tower, Path]) -> None:
    streamed = streamed_of(tower)
    compiled = torch.compile(streamed, backend="eager")
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(2, 32)
            assert torch.equal(compiled(x), tower[0](x))


# ---- Operations on absent parameters


REFUSED: dict[str, Callable[[Any, Path], Any]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "copy": lambda model, _: copy.deepcopy(model),
    "copy of a block": lambda model, _: copy.deepcopy(model.blocks[1]),
    "pickle": lambda model, _: pickle.dumps(model),
    "pickle of a block": lambda model, _: pickle.dumps(model.blocks[1]),
    "torch.save": lambda model, path: torch.save(model, path / "a"),
    "torch.save of parameters": lambda model, path: torch.save(
        dict(model.named_parameters()), path / "a"
    ),
    "safetensors": lambda model, path: save_file(dict(model.named_parameters()), path / "a"),
    "penstock.save": lambda model, path: penstock.save(path / "b", dict(model.named_parameters())),
    "load_state_dict": lambda model, _: model.load_state_dict(Tower().state_dict()),
    "load_state_dict of a block": lambda model, _: model.blocks[1].load_state_dict(
        Tower().blocks[1].state_dict()
    ),
    "computing": lambda model, _: torch.nn.functional.linear(
        torch.ones(3, 32), model.blocks[1][0].weight
    ),
    "in place": lambda model, _: model.blocks[1][0].weight.mul_(2),
    "an address": lambda model, _: model.blocks[1][0].weight.data_ptr(),
    "numpy": lambda model, _: model.blocks[1][0].weight.numpy(),
    "data": lambda model, _: model.blocks[1][0].weight.data,
}


@pytest.mark.parametrize("what", REFUSED)
def test_parameters_that_are_in_storage_are_not_taken_for_others(
    tower: tuple[Tower, Path], what: str
) -> None:
    streamed = streamed_of(tower)
    x = torch.randn(2, 32)
    for _ in range(2):
        with pytest.raises(UnsupportedStateError):
            REFUSED[what](streamed, tower[1])
        with torch.no_grad():
            assert torch.equal(streamed(x), tower[0](x))


def test_save_pretrained_writes_no_weights(tmp_path: Path, streamed_llamas: list[Any]) -> None:
    with pytest.raises(UnsupportedStateError, match="in storage"):
        streamed_llamas[0].save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_the_state_of_a_model_that_is_all_there(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    streamed = streamed_of(tower, 1 << 20)
    with torch.no_grad():
        streamed(torch.randn(1, 32), (0, 1, 2, 3, 4))
    state = streamed.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(one, state[name]) for name, one in model.state_dict().items())
    for take in ("copy", "pickle", "load_state_dict"):
        with pytest.raises(UnsupportedStateError):
            REFUSED[take](streamed, directory)


# ---- Memory


class Even(torch.nn.Module):
    """Blocks larger than a huge page."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(800, 800) for _ in range(4))
        self.scale = torch.nn.Parameter(torch.ones(800))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


@pytest.mark.parametrize("kind", [Tower, Even])
def test_the_error_names_the_least_that_works_to_the_byte(tmp_path: Path, kind: Any) -> None:
    model = kind()
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is the least that works") as caught:
        offload.stream(kind(), weights=tmp_path, memory_bytes=1)
    least = int(re.findall(r"(\d+) is the least", str(caught.value))[0])
    with pytest.raises(ValueError, match=f"{least} is the least that works"):
        offload.stream(kind(), weights=tmp_path, memory_bytes=least - 1)
    x = torch.randn(2, next(model.parameters()).shape[-1] if kind is Even else 32)
    everything = offload.report(
        offload.stream(kind(), weights=tmp_path, memory_bytes=1 << 30)
    ).resident_bytes
    for memory_bytes in {least, least + 1, (least + everything) // 2, everything - 1, everything}:
        other = kind()
        other.load_state_dict(model.state_dict())
        streamed = offload.stream(other, weights=tmp_path, memory_bytes=memory_bytes)
        with torch.inference_mode():
            assert torch.equal(streamed(x), model(x))
        told = offload.report(streamed)
        assert told.resident_bytes + told.passing_bytes <= memory_bytes
        assert (told.pass_bytes == 0) == (memory_bytes >= everything)


# ---- Several models


def test_models_that_share_a_budget(tower: tuple[Tower, Path]) -> None:
    model, x = tower[0], torch.randn(2, 32)
    alone = offload.report(streamed_of(tower, 1 << 20)).resident_bytes
    budget = offload.Budget(int(1.5 * alone))
    with torch.no_grad():
        first = streamed_of(tower, budget)
        assert torch.equal(first(x), model(x))
        assert offload.report(first).pass_bytes == 0
        second = streamed_of(tower, budget)
        for _ in range(2):
            assert torch.equal(first(x), model(x))
            assert torch.equal(second(x), model(x))
        told = [offload.report(one) for one in (first, second)]
        taken = [one.resident_bytes + one.passing_bytes for one in told]
        assert sum(taken) <= budget.memory_bytes
        assert all(one.pass_bytes > 0 for one in told)
        assert abs(taken[0] - taken[1]) <= alone // 4
        others: list[Any] = []
        with pytest.raises(ValueError, match=r"with the \d+ that share it, .* is the least"):
            others.extend(streamed_of(tower, budget) for _ in range(20))
        for one in (first, second, *others):
            assert torch.equal(one(x), model(x))
        told = [offload.report(one) for one in (first, second, *others)]
        assert sum(one.resident_bytes + one.passing_bytes for one in told) <= budget.memory_bytes
        # The share of a deleted model is available for the next one.
        del second, others, one
        gc.collect()
        third = streamed_of(tower, budget)
        assert torch.equal(third(x), model(x))
    with pytest.raises(ValueError, match="memory_bytes"):
        offload.Budget(0)


def test_a_share_becomes_smaller_while_a_model_is_called(tower: tuple[Tower, Path]) -> None:
    model, x = tower[0], torch.randn(2, 32)
    alone = offload.report(streamed_of(tower, 1 << 20)).resident_bytes
    budget = offload.Budget(2 * alone)
    first = streamed_of(tower, budget)
    is_over, wrong = threading.Event(), []

    def call() -> None:
        with torch.inference_mode():
            while not is_over.is_set():
                if not torch.equal(first(x), model(x)):
                    wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    others = []
    for _ in range(2):
        others.append(streamed_of(tower, budget))
        with torch.inference_mode():
            assert torch.equal(others[-1](x), model(x))
    is_over.set()
    for thread in threads:
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()
    assert not wrong

    def within(*_: Any) -> None:
        streamed_of(tower, budget)

    del others
    gc.collect()
    first.blocks[1].register_forward_hook(within)
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedStateError, match="stream the other one before"),
    ):
        first(x)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 200)), min_size=1, max_size=6),
    rest=st.integers(0, 1000),
)
def test_shares_of_a_budget(sizes: list[tuple[int, int]], rest: int) -> None:
    needs = [Needs(least, least + more, "") for least, more in sizes]
    memory = sum(one.least_bytes for one in needs) + rest
    shares = divided(memory, needs)
    assert sum(shares) <= memory
    for share, one in zip(shares, needs, strict=True):
        assert one.least_bytes <= share <= one.most_bytes
    if any(share < one.most_bytes for share, one in zip(shares, needs, strict=True)):
        assert memory - sum(shares) < len(needs)


def test_two_models_in_two_threads(
    llamas: list[tuple[Any, Path]], streamed_llamas: list[Any]
) -> None:
    def work(models: tuple[Any, Any]) -> None:
        for seed in range(3):
            tokens = torch.randint(1, 300, (2, 5), generator=torch.Generator().manual_seed(seed))
            found = [one.generate(tokens, max_new_tokens=4, do_sample=False) for one in models]
            assert torch.equal(*found)

    on_threads(work, zip([model for model, _ in llamas], streamed_llamas, strict=True))
