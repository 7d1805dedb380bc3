"""`penstock.offload.report` and traces of a streamed model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

import penstock
from penstock import offload
from penstock.common.tracing import recorded
from penstock.offload.streaming.forward_passes import ForwardPass, ForwardPasses

if TYPE_CHECKING:
    from pathlib import Path


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def streamed(tmp_path: Path) -> Stack:
    model = Stack()
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    made: Stack = offload.stream(model, weights=tmp_path, memory_bytes=4 * 24_576)
    return made


def test_a_report_holds_a_pass_against_what_it_takes_at_least(streamed: Stack) -> None:
    told = offload.report(streamed)
    assert (told.uses, told.passes, told.pass_seconds) == (0, 0, None)
    assert told.first_pass_seconds is None
    assert told.of_roofline is None
    assert "weights" in str(told)
    with torch.inference_mode():
        for _ in range(4):
            streamed(torch.ones(1, 64))
    told = offload.report(streamed)
    assert (told.uses, told.passes) == (24, 4)
    assert told.hits <= 24
    assert told.first_pass_seconds > 0
    # Beside the measured times: a part of one, and a ratio of reported values.
    assert 0 < told.computing_seconds <= told.pass_seconds
    assert told.gb_per_second > 0
    assert told.of_roofline == pytest.approx(told.roofline_seconds / told.pass_seconds)
    assert told.engine in ("uring", "threads")
    assert told.in_flight_max > 0
    assert told.direct or told.fallbacks
    slow = offload.report(streamed, gb_per_second=1e-6)
    assert slow.roofline_seconds == pytest.approx(told.pass_bytes / 1e3)
    fast = offload.report(streamed, gb_per_second=1e9)
    assert fast.roofline_seconds == fast.computing_seconds
    assert "of the roofline" in str(told)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="gb_per_second"):
            offload.report(streamed, gb_per_second=wrong)


def test_a_pass_ends_where_the_next_one_begins() -> None:
    passes = ForwardPasses()
    assert passes.usual is None
    begun = []
    for number in range(4):
        # The last module shares a tensor with the first one, so both are of one unit.
        for index, place in ((5, 0), (1, 0), (5, 1)):
            begun.append(passes.called(index, place))
            passes.took(computing_seconds=float(number))
            passes.took(stalled_seconds=0.5)
    assert begun == [True, False, False] * 4
    assert passes.first == ForwardPass(0.0, 1.5)
    # The last pass may not be over.
    assert passes.usual == ForwardPass(4.5, 1.5)


@pytest.mark.parametrize(
    ("calls", "begun"),
    [
        # The head shares the embedding's weight, and may compute in two calls.
        ("embed block head  embed block head  embed block head", "embed embed embed"),
        ("embed block head head  embed block head head  embed", "embed embed embed"),
        # The decoder's embedding is called for each token, the encoder's once a generation.
        ("enc block dec block head  dec block head  dec block head", "enc dec dec"),
        ("enc block dec block  dec block  enc block dec block  dec", "enc dec dec dec"),
        # Generations of one token each.
        ("enc block dec block head  enc block dec block head", "enc enc"),
    ],
)
def test_a_pass_begins_with_whichever_embedding_comes_for_each_token(
    calls: str, begun: str
) -> None:
    passes = ForwardPasses()
    units = {"embed": (5, 0), "enc": (5, 0), "dec": (5, 1), "head": (5, 2), "block": (1, 0)}
    found = []
    for name in calls.split():
        if passes.called(*units[name]):
            found.append(name)
        passes.took(computing_seconds=1.0)
    assert found == begun.split()


def test_generation_makes_a_pass_for_each_token_of_encoders_and_decoders(tmp_path: Path) -> None:
    """Encoder and decoder embed by modules of their own, whose weight is one, as the head's is."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=96, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        decoder_start_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    streamed = offload.stream(tmp_path, memory_bytes=300_000)
    passes = []
    begun = time.perf_counter()
    with torch.inference_mode():
        for _ in range(2):
            made = streamed.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=12, do_sample=False)
            assert made.shape == (1, 13)
            passes.append(offload.report(streamed).passes)
    seconds = time.perf_counter() - begun
    assert passes == [12, 24]
    told = offload.report(streamed)
    # The median of 22 passes: half of them took as long at least.
    assert 0 < told.pass_seconds <= seconds / 11


def test_passes_count_anew_where_a_share_has_changed(tmp_path: Path) -> None:
    save_file(dict(Stack().named_parameters()), tmp_path / "model.safetensors")
    budget = offload.Budget(6 * 24_576)
    first = offload.stream(Stack(), weights=tmp_path, memory_bytes=budget)
    # Reading begins before the first call.
    assert offload.report(first).read_bytes > 0
    with torch.inference_mode():
        for _ in range(3):
            first(torch.ones(1, 64))
        assert offload.report(first).pass_seconds is not None
        second = offload.stream(Stack(), weights=tmp_path, memory_bytes=budget)
        assert offload.report(first).pass_seconds is None
        for _ in range(3):
            first(torch.ones(1, 64))
            second(torch.ones(1, 64))
    for told in (offload.report(first), offload.report(second)):
        assert told.pass_bytes > 0
        assert told.pass_seconds is not None


def test_a_trace_has_reads_under_the_blocks_that_waited_for_them(
    streamed: Stack, tmp_path: Path
) -> None:
    with torch.inference_mode():
        with penstock.trace(tmp_path / "trace.json"):
            for _ in range(30):
                streamed(torch.ones(1, 64))
            told = offload.report(streamed)
        streamed(torch.ones(1, 64))
    found = recorded.read(tmp_path / "trace.json")
    calls = [span for span in found.spans if span.name.startswith("blocks.")]
    assert [span.name for span in calls] == [f"blocks.{index}" for index in range(6)] * 30
    assert {span.row.split()[0] for span in calls} == {"caller"}
    waits = [span for span in found.spans if span.name == "weights"]
    assert len([span for span in waits if span.row.startswith("stall")]) == told.uses - told.hits
    for wait in waits:
        if not wait.row.startswith("caller"):
            continue
        (call,) = [one for one in calls if one.begin <= wait.begin and wait.end <= one.end]
        assert call.name == wait.detail
        reads = [
            one
            for one in found.spans
            if one.name == "read"
            and one.row == wait.row
            and wait.begin - 1e-3 <= one.begin <= one.end <= wait.end + 1e-3
        ]
        assert "model.safetensors" in reads[0].detail
    ahead = {
        span.detail
        for span in found.spans
        if span.name == "read" and span.row.startswith("background")
    }
    assert ahead <= {f"blocks.{index}" for index in range(6)}
    assert ahead
    assert any(request.file.endswith("model.safetensors") for request in found.requests)
