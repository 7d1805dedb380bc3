"""`penstock.offload.stream` on failing reads: right numbers, or an error that names the file.

The files are on a file system in user space, below each engine. `PENSTOCK_TORTURE_FAULTS` sets the
number of random faults for each engine.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from towers import Tower, copy_of

import penstock
from conftest import need_uring, tell
from failing import failing_files
from penstock import offload
from penstock.errors import CorruptCheckpointError, TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from failing import FailingFiles

FAULTS = int(os.environ.get("PENSTOCK_TORTURE_FAULTS", 8))
SEED = os.environ.get("PENSTOCK_TORTURE_SEED", "4711")
ROOM_BYTES = 72_000
"""Keeps some blocks in memory; the others are read in each pass."""
ALWAYS = 1 << 30


class Streams:
    """Models streamed from files that may fail, and the same model in memory."""

    def __init__(self, files: FailingFiles, engine: str) -> None:
        torch.manual_seed(1)
        self.files = files
        self._model = Tower()
        self._io = offload.TensorIO(engine=engine)
        self._x = torch.randn(2, 32)
        with torch.inference_mode():
            self._expected = self._model(self._x)
        self.safetensors, self.checkpoint = files.path / "tower", files.path / "checkpoint"
        self.safetensors.mkdir()
        for name, one in self._model.named_parameters():
            save_file({name: one.detach()}, self.safetensors / f"{name}.safetensors")
        penstock.save(self.checkpoint, self._model.state_dict())

    def made(self, weights: Path) -> Any:
        return offload.stream(
            copy_of(self._model), weights=weights, memory_bytes=ROOM_BYTES, io=self._io
        )

    def check_pass(self, streamed: Any) -> None:
        with torch.inference_mode():
            assert torch.equal(streamed(self._x), self._expected)

    def close(self) -> None:
        self._io.close()


@pytest.fixture(params=["uring", "threads"])
def streams(request: pytest.FixtureRequest, tmp_path: Path, need_root: None) -> Iterator[Streams]:
    if request.param == "uring":
        need_uring()
    with failing_files(tmp_path / "failing") as files:
        made = Streams(files, request.param)
        yield made
        made.close()


def check_names(error: penstock.PenstockError, weights: Path) -> None:
    """Checks that an error names the file."""
    assert isinstance(error, TransferError | CorruptCheckpointError), error
    assert str(weights) in str(error)


def test_a_pass_gives_right_numbers_or_names_the_file_that_cannot_be_read(
    streams: Streams,
) -> None:
    tell(f"seed {SEED}, {FAULTS} faults")
    chooser = random.Random(SEED)
    kept = {weights: streams.made(weights) for weights in (streams.safetensors, streams.checkpoint)}
    faults = [("EIO", 0, ALWAYS)]
    kinds = ["EIO", "EIO", "ESTALE", "short"]
    faults += [
        (chooser.choice(kinds), chooser.randrange(60), chooser.choice([1, 3, ALWAYS]))
        for _ in range(FAULTS)
    ]
    raised = set()
    for kind, skip, count in faults:
        weights, streamed = chooser.choice(list(kept.items()))
        tell(weights.name, kind, skip, count)
        streams.files.fail("read", kind, skip, count)
        for _ in range(2):
            try:
                streams.check_pass(streamed)
            except penstock.PenstockError as error:
                check_names(error, weights)
                raised.add(kind)
        streams.files.heal()
        streams.check_pass(streamed)
    assert "EIO" in raised
    assert "short" not in raised


def first_error(streams: Streams, streamed: Any) -> TransferError:
    """Returns the error that one of the next passes raises."""
    while True:
        try:
            streams.check_pass(streamed)
        except TransferError as error:
            return error


def test_a_read_ahead_that_failed_is_made_again_when_its_weights_are_needed(
    streams: Streams,
) -> None:
    for weights in (streams.safetensors, streams.checkpoint):
        streamed = streams.made(weights)
        for skip in range(0, 40, 13):
            streams.files.fail("read", "EIO", skip, ALWAYS)
            check_names(first_error(streams, streamed), weights)
            streams.files.heal()
            streams.check_pass(streamed)


def test_what_is_read_of_a_checkpoint_for_the_first_time_has_the_bits_that_were_saved(
    streams: Streams,
) -> None:
    weights = streams.checkpoint
    refused = []
    for skip in range(0, 40, 8):
        for count in (1, ALWAYS):
            streams.files.fail("read", "flipped", skip, count, "shard")
            try:
                streams.check_pass(streams.made(weights))
            except CorruptCheckpointError as error:
                check_names(error, weights)
                refused.append(count)
            streams.files.heal()
    # Bits that are wrong once are read again.
    assert set(refused) == {ALWAYS}
    streams.check_pass(streams.made(weights))
