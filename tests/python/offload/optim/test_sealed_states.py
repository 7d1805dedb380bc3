"""Sealed states: nothing clear on the disk, keys that seal once, changes that are noticed."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap

import penstock
import seals
from offload.optim import ended
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
from penstock import _native, offload
from penstock.errors import (
    CannotSealError,
    CorruptCheckpointError,
    KmsError,
    NotSealedError,
    PenstockError,
    SealedError,
    TamperedError,
    WrongKeyError,
)
from penstock.offload.optim import import_state, state_dict
from sealed_reader import SealedCheckpoint, SealError

DIGITS = "5e" * 32
KEY = "PENSTOCK-SECRET-KEY-1" + DIGITS
OTHER = "PENSTOCK-SECRET-KEY-1" + "77" * 32
SEALED = {"sealing": penstock.Sealing([KEY]), "identities": [KEY]}
SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", "1"))
CHUNK = 1 << 20

GENERATOR = (1 | 0x9A6C9329AC4BC9B5 << 1).to_bytes(9, "little")
"""Added to a text anywhere, it leaves the CRC-64 as it was."""


def begun(directory: Path, ours: list[Any], **options: Any) -> tuple[list[Any], Any]:
    """Returns an optimizer in a directory that has files already, with copies of parameters."""
    again = [torch.nn.Parameter(one.detach().clone()) for one in ours]
    return again, offload.AdamW(again, directory=directory, memory_bytes=MEMORY_BYTES, **options)


def moments_of(optimizer: Any) -> dict[str, Any]:
    """Returns a state in memory."""
    state = optimizer.state_dict()["state"]
    return {
        "state": {
            number: {name: in_memory(value) for name, value in some.items()}
            for number, some in state.items()
        }
    }


def file_of(optimizer: Any, number: int = 2, moment: str = "exp_avg") -> Path:
    """Returns the file of a moment, and its offset there."""
    return Path(optimizer.state_dict()["state"][number][moment].file.path)


def xored(file: Path, at: int, by: bytes) -> None:
    """Changes bytes of a file in place."""
    with open(file, "r+b") as opened:
        opened.seek(at)
        before = opened.read(len(by))
        opened.seek(at)
        opened.write(bytes(one ^ other for one, other in zip(before, by, strict=True)))


def raw(directory: Path) -> bytes:
    """Returns the bytes of all files below a directory."""
    return b"".join(file.read_bytes() for file in directory.rglob("*") if file.is_file())


# Nothing clear, and the same bits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("memory_bytes", [25165824, 64 << 20])
def test_the_bits_are_those_of_a_clear_state(
    tmp_path: Path, dtype: Any, masters: bool, memory_bytes: int
) -> None:
    options: dict[str, Any] = {"masters": masters, "memory_bytes": memory_bytes}
    ours, theirs = parameters(dtype), parameters(dtype)
    one = offload.AdamW(ours, amsgrad=True, directory=tmp_path / "sealed", **SEALED, **options)
    other = offload.AdamW(theirs, amsgrad=True, directory=tmp_path / "clear", **options)
    for step in range(3):
        set_gradients(step, ours, theirs, without=lambda index, step=step: index == step)
        one.step()
        other.step()
    assert_equal(ours, theirs)
    assert_equal_states(other.state_dict(), one.state_dict())
    one.close()
    other.close()


@pytest.mark.quick
@pytest.mark.parametrize("sealing", [None, SEALED["sealing"]])
def test_nothing_of_a_sealed_state_is_clear(tmp_path: Path, sealing: Any) -> None:
    pattern = struct.pack("<f", 3.25) * 16
    parameter = torch.nn.Parameter(torch.zeros(700, 1000))
    optimizer = offload.SGD(
        [parameter], momentum=0.9, directory=tmp_path / "state", sealing=sealing
    )
    seen = b""
    for _ in range(2):
        # The first step has the gradient for momentum; the second one 1.9 times as much.
        parameter.grad = torch.full_like(parameter, 3.25)
        optimizer.step()
        seen += raw(tmp_path / "state")
    state = optimizer.state_dict()
    penstock.save(tmp_path / "state" / "checkpoint", state, sealing=sealing)
    _, other = begun(tmp_path / "state" / "imported", [parameter], sealing=sealing)
    clear = {"exp_avg": torch.full((700, 1000), 3.25), "exp_avg_sq": torch.ones(700, 1000)}
    groups = other.state_dict()["param_groups"]
    other.load_state_dict({"state": {0: {"step": 1.0, **clear}}, "param_groups": groups})
    seen += raw(tmp_path / "state")
    # Long marks: random bytes hold short ones by chance.
    for secret in (pattern, b"momentum_buffer", b"exp_avg"):
        assert (secret in seen) is (sealing is None), secret
    assert KEY.encode() not in seen
    optimizer.close()
    other.close()


@pytest.mark.quick
def test_each_writing_of_a_file_has_a_key_of_its_own(tmp_path: Path) -> None:
    """Equal moments in equal places of the same file never have equal bytes."""
    parameter = torch.nn.Parameter(torch.zeros(700, 1000))
    optimizer = offload.SGD([parameter], momentum=0.5, directory=tmp_path / "state", **without())
    chunks = set()
    inodes = []
    for step in range(6):
        parameter.grad = torch.ones_like(parameter) * (1 if step == 0 else 0.5)
        optimizer.step()
        file = file_of(optimizer, 0, "momentum_buffer")
        inodes.append(file.stat().st_ino)
        content = file.read_bytes()[4096:]
        assert len(content) == 4 * 700 * 1000
        chunks.update(content[at : at + 4096] for at in range(0, len(content) - 4096, 4096))
    assert len(set(inodes)) < len(inodes), "files are written again"
    assert len(chunks) == 6 * (4 * 700 * 1000 // 4096)
    optimizer.close()


def without() -> dict[str, Any]:
    """Returns the options of a run that has no secret."""
    return {"sealing": SEALED["sealing"]}


# Checkpoints.


@pytest.mark.quick
def test_sealed_checkpoints_link_sealed_files(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path / "state", **without())
    theirs, other = stepped(tmp_path / "clear")
    state = {"model": [one.detach() for one in ours], "optimizer": optimizer.state_dict()}
    files = {file_of(optimizer, moment=name).stat().st_ino for name in ("exp_avg", "exp_avg_sq")}
    paths = [tmp_path / "first", tmp_path / "second"]
    for path, key in zip(paths, (KEY, OTHER), strict=True):
        penstock.save(path, state, sealing=penstock.Sealing([key]))
        assert files <= {file.stat().st_ino for file in path.iterdir()}
    del state
    for step in range(2, 5):
        set_gradients(step, ours)
        optimizer.step()
    optimizer.close()
    shutil.rmtree(tmp_path / "state")
    for path, key in zip(paths, (KEY, OTHER), strict=True):
        assert penstock.verify(path).ok
        loaded = penstock.load(path, identities=[key])
        assert_equal(loaded["model"], theirs)
        assert_equal_states(other.state_dict(), loaded["optimizer"])
        some = penstock.load(path, keys=["optimizer.state.2.*"], identities=[key])
        assert torch.equal(
            some["optimizer"]["state"][2]["exp_avg"],
            in_memory(other.state_dict()["state"][2]["exp_avg"]),
        )
        with pytest.raises(SealedError):
            penstock.load(path)
        with pytest.raises(WrongKeyError):
            penstock.load(path, identities=["PENSTOCK-SECRET-KEY-1" + "11" * 32])
    other.close()


@pytest.mark.quick
def test_a_checkpoint_is_sealed_with_its_states_or_refused(tmp_path: Path) -> None:
    _, sealed = stepped(tmp_path / "sealed", **without())
    _, clear = stepped(tmp_path / "clear")
    with pytest.raises(CannotSealError, match="clear checkpoint"):
        penstock.save(tmp_path / "checkpoint", {"optimizer": sealed.state_dict()})
    with pytest.raises(CannotSealError, match="in files"):
        penstock.save(
            tmp_path / "checkpoint", {"optimizer": clear.state_dict()}, sealing=SEALED["sealing"]
        )
    assert not (tmp_path / "checkpoint").exists()
    sealed.close()
    clear.close()


@pytest.mark.parametrize("way", ["fill", "memory", "files"])
@pytest.mark.parametrize("piece_bytes", [64 << 10, 16 << 20])
def test_states_come_in_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(state_dict, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(import_state, "PIECE_BYTES", piece_bytes)
    shapes = (*SMALL, *(((16, 16), (5,), (3, 7), (), (0, 2))[number % 5] for number in range(100)))
    ours, one = stepped(tmp_path / "one", shapes=shapes, **without())
    penstock.save(tmp_path / "checkpoint", {"optimizer": one.state_dict()}, **without())
    theirs, other = stepped(tmp_path / "other", steps=1, shapes=shapes, **without())
    if way == "fill":
        # The parameters in another order than in the files.
        state = {"optimizer": other.state_dict()}
        penstock.load(tmp_path / "checkpoint", into=state, identities=[KEY])
        state = state["optimizer"]
    elif way == "memory":
        state = penstock.load(tmp_path / "checkpoint", identities=[KEY])["optimizer"]
    else:
        state = one.state_dict()
    other.load_state_dict(state)
    assert_equal_states(one.state_dict(), other.state_dict())
    with torch.no_grad():
        for mine, yours in zip(ours, theirs, strict=True):
            yours.copy_(mine)
    for step in range(2, 4):
        set_gradients(step, ours, theirs)
        one.step()
        other.step()
    assert_equal(ours, theirs)
    assert_equal_states(one.state_dict(), other.state_dict())
    one.close()
    other.close()


def test_an_import_that_failed_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_dict, "PIECE_BYTES", 64 << 10)
    _, optimizer = stepped(tmp_path / "state", **without())
    clear = moments_of(optimizer)
    target = optimizer._stored.target(0, "exp_avg", None).filler
    wanted = [(0, "exp_avg"), (0, "exp_avg_sq"), (2, "exp_avg")]
    fails = [False]

    def read(memory: Any, boxes: Any) -> None:
        if fails[0] and boxes[0].target == 2:
            raise RuntimeError("in its middle")
        memory.fill_(1)

    # Files that are new are begun again.
    fails[0] = True
    with pytest.raises(RuntimeError, match="middle"):
        target.put(wanted, read)
    fails[0] = False
    target.put(wanted, read)
    # Files with tensors of an earlier call are lost.
    fails[0] = True
    with pytest.raises(RuntimeError, match="middle"):
        target.put([(1, "exp_avg"), (1, "exp_avg_sq"), (2, "exp_avg_sq")], read)
    with pytest.raises(PenstockError, match="load the state again"):
        target.finish()
    assert_equal_states(clear, optimizer.state_dict())
    state = {**optimizer.state_dict(), **clear}
    optimizer.load_state_dict(state)
    assert_equal_states(clear, optimizer.state_dict())
    optimizer.close()


def test_a_run_is_resumed_from_a_sealed_store(tmp_path: Path) -> None:
    def made(name: str) -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 1000)
        optimizer = offload.AdamW(
            model.parameters(), directory=tmp_path / name, memory_bytes=MEMORY_BYTES, **SEALED
        )
        return model, optimizer, penstock.Training(model=model, optimizer=optimizer)

    def step(model: Any, optimizer: Any, count: int) -> None:
        set_gradients(count, list(model.parameters()))
        optimizer.step()

    model, optimizer, training = made("one")
    with penstock.CheckpointStore(tmp_path / "store", **SEALED) as store:
        for count in range(2):
            step(model, optimizer, count)
        store.save(2, training)
        again, other, resumed = made("other")
        assert store.resume(resumed) is not None
        for count in range(2, 4):
            step(model, optimizer, count)
            step(again, other, count)
    assert_equal(list(model.parameters()), list(again.parameters()))
    assert_equal_states(optimizer.state_dict(), other.state_dict())
    optimizer.close()
    other.close()


# Recovered generations.


@pytest.mark.quick
def test_a_generation_is_recovered_with_its_key_alone(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path / "state", **without())
    state = moments_of(optimizer)
    optimizer.close()
    shards = tmp_path / "state" / "rank-00000" / "generation"
    before = {file.stat().st_ino for file in shards.glob("shard-*")}
    sealing = SEALED["sealing"]
    for options, error in (
        ({}, SealedError),
        ({"sealing": sealing}, SealedError),
        ({"sealing": sealing, "identities": [OTHER]}, WrongKeyError),
    ):
        _, closed = begun(tmp_path / "state", ours, **options)
        with pytest.raises(error) as caught:
            closed.recover()
        assert OTHER not in str(caught.value)
        closed.close()
    again, optimizer = begun(tmp_path / "state", ours, **SEALED)
    assert optimizer.recover()
    assert {file.stat().st_ino for file in shards.glob("shard-*")} == before
    assert_equal_states(state, optimizer.state_dict())
    theirs, other = stepped(tmp_path / "other")
    for step in range(2, 5):
        set_gradients(step, again, theirs)
        optimizer.step()
        other.step()
    assert_equal(again, theirs)
    assert_equal_states(other.state_dict(), optimizer.state_dict())
    optimizer.close()
    other.close()


@pytest.mark.quick
def test_a_clear_generation_is_refused(tmp_path: Path) -> None:
    ours, clear = stepped(tmp_path / "state")
    clear.close()
    _, optimizer = begun(tmp_path / "state", ours, **SEALED)
    with pytest.raises(NotSealedError):
        optimizer.recover()
    optimizer.close()


def test_another_grouping_is_copied_sealed(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path / "state", **without())
    state = moments_of(optimizer)
    optimizer.close()
    # One more parameter, so that the files have another layout.
    extra = torch.nn.Parameter(torch.zeros(70_000))
    again, optimizer = begun(tmp_path / "state", [*ours, extra], **SEALED)
    assert optimizer.recover()
    assert_equal_states(state, optimizer.state_dict())
    set_gradients(2, again)
    optimizer.step()
    optimizer.close()


def test_what_keys_are_for_is_checked_first(tmp_path: Path) -> None:
    ours = parameters(shapes=SMALL)
    with pytest.raises(TypeError, match="Sealing"):
        offload.AdamW(ours, directory=tmp_path / "state", sealing=KEY)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without sealing="):
        offload.SGD(ours, momentum=0.9, directory=tmp_path / "state", identities=[KEY])
    assert not (tmp_path / "state").exists()


def test_a_key_service_that_is_away_stops_a_step_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, optimizer = stepped(tmp_path / "state", **without())
    theirs, other = stepped(tmp_path / "clear")
    state = moments_of(optimizer)
    set_gradients(2, ours, theirs)

    def away(_: Any) -> Any:
        raise KmsError("away", uri="aws-kms://alias/none")

    with monkeypatch.context() as patched:
        patched.setattr(penstock.Sealing, "wrap_new", away)
        with pytest.raises(KmsError):
            optimizer.step()
        with pytest.raises(KmsError):
            optimizer.load_state_dict(optimizer.state_dict())
    assert_equal_states(state, optimizer.state_dict())
    optimizer.step()
    other.step()
    assert_equal(ours, theirs)
    assert_equal_states(other.state_dict(), optimizer.state_dict())
    optimizer.close()
    other.close()


# Changes.


@pytest.mark.quick
@pytest.mark.parametrize("has_its_digest", [False, True])
def test_a_changed_byte_is_an_error(tmp_path: Path, has_its_digest: bool) -> None:
    ours, optimizer = stepped(tmp_path / "state", **without())
    file = file_of(optimizer)
    kept = optimizer.state_dict()
    error: type[Exception] = TamperedError if has_its_digest else CorruptCheckpointError
    xored(file, 200_000, GENERATOR if has_its_digest else b"\1")
    with pytest.raises(error, match="safetensors") as caught:
        kept["state"][2]["exp_avg"].read()
    assert isinstance(caught.value, TamperedError) is has_its_digest
    before = [one.detach().clone() for one in ours]
    set_gradients(2, ours)
    with pytest.raises(error) as caught:
        optimizer.step()
    assert file.name in str(caught.value)
    assert "exp_avg" in str(caught.value)
    # The chunk is that of the first window, so no parameter has changed.
    assert_equal(before, ours)
    del kept
    optimizer.close()
    _, again = begun(tmp_path / "state", ours, **SEALED)
    with pytest.raises(error) as caught:
        again.recover()
    assert isinstance(caught.value, TamperedError) is has_its_digest
    again.close()


def test_chunks_of_another_file_place_or_generation_do_not_open(tmp_path: Path) -> None:
    ours, optimizer = stepped(tmp_path / "state", steps=1, **without())
    shutil.copytree(tmp_path / "state", tmp_path / "older")
    set_gradients(1, ours)
    optimizer.step()
    optimizer.close()
    generation = tmp_path / "state" / "rank-00000" / "generation"
    older = tmp_path / "older" / "rank-00000" / "generation"
    newer = sorted(generation.glob("shard-*"))
    sources = [
        ("another moment", newer[1].read_bytes()),
        ("an older generation", sorted(older.glob("shard-*"))[0].read_bytes()),
    ]
    content = newer[0].read_bytes()
    for _, other in sources:
        # With its digest forged, in the part and the manifest.
        newer[0].unlink()
        newer[0].write_bytes(other[: len(content)])
        _, again = begun(tmp_path / "state", ours, **SEALED)
        with pytest.raises(CorruptCheckpointError):
            again.recover()
        again.close()
    # The part of the older generation, too: the manifest knows its hash.
    newer[0].write_bytes(sources[1][1])
    (part,) = generation.glob("part-*")
    (old_part,) = older.glob("part-*")
    part.write_bytes(old_part.read_bytes())
    _, again = begun(tmp_path / "state", ours, **SEALED)
    with pytest.raises(CorruptCheckpointError):
        again.recover()
    again.close()
    # The older generation, whole, opens: nothing there tells its age.
    shutil.rmtree(generation)
    shutil.copytree(older, generation)
    _, again = begun(tmp_path / "state", ours, **SEALED)
    assert again.recover()
    assert again.state_dict()["state"][0]["step"] == 1
    again.close()


def test_a_seal_takes_whole_chunks_once() -> None:
    seal = _native.FileSeal(3 * CHUNK + 5, 4096)
    memory = torch.ones(CHUNK, dtype=torch.uint8)
    target = import_state.seal_chunks
    target(seal, memory, 0)
    assert bool((memory[:4096] == 1).all())
    assert int((memory[4096:] == 1).sum()) < CHUNK // 100
    with pytest.raises(ValueError, match="whole chunks"):
        target(seal, memory[:4096], CHUNK)
    with pytest.raises(ValueError, match="whole chunks"):
        target(seal, memory, 3 * CHUNK)
    with pytest.raises(BaseException, match="sealed once"):
        target(seal, memory, 0)
    with pytest.raises(ValueError, match="header_bytes"):
        _native.FileSeal(100, 4096)


# Other readers.


@pytest.mark.quick
def test_a_reader_of_the_page_opens_it(tmp_path: Path) -> None:
    _, optimizer = stepped(tmp_path / "state", **without())
    path = tmp_path / "checkpoint"
    penstock.save(path, {"optimizer": optimizer.state_dict()}, **without())
    manifest = json.loads((path / "manifest.json").read_text())
    (wrap,) = manifest["wraps"]
    key = aes_key_unwrap(bytes.fromhex(DIGITS), base64.b64decode(wrap["key"]))
    opened = SealedCheckpoint(path, key)
    values = optimizer.state_dict()["state"]
    for row in opened.part["tensors"]:
        _, _, number, moment = row["name"].split(".")
        if moment == "step":
            continue
        begin, end = row["range"]
        value = in_memory(values[int(number)][moment])
        assert opened.opened[row["file"]][begin:end] == value.numpy().tobytes(), row["name"]
    with pytest.raises(SealError):
        SealedCheckpoint(path, bytes(32))
    optimizer.close()


def test_tools_take_it_like_other_sealed_checkpoints(tmp_path: Path) -> None:
    _, optimizer = stepped(tmp_path / "state", **without())
    state = moments_of(optimizer)
    keys = {"identities": [KEY]}
    path = tmp_path / "store" / "step-0000000001"
    with penstock.CheckpointStore(tmp_path / "store", **SEALED) as store:
        store.save(1, optimizer.state_dict())
        assert store.scrub().ok
    optimizer.close()
    penstock.sealing.rotate(path, [OTHER], **keys)
    keys = {"identities": [OTHER]}
    with pytest.raises(WrongKeyError):
        penstock.load(path, identities=[KEY])
    assert_equal_states(state, penstock.load(path, **keys))
    lazily = penstock.load(path, keys=["state.0.exp_avg"], **keys)
    assert torch.equal(lazily["state"][0]["exp_avg"], state["state"][0]["exp_avg"])
    penstock.salvage(path, tmp_path / "clear", unseal=True, **keys)
    assert_equal_states(state, penstock.load(tmp_path / "clear"))
    # A damaged chunk takes the moments in it along, and no others.
    shard = max(path.glob("shard-*"))
    xored(shard, shard.stat().st_size - 10, b"\1")
    assert not penstock.verify(path).ok
    report = penstock.salvage(path, tmp_path / "part", sealing=SEALED["sealing"], **keys)
    assert 0 < len(report.missing) < 6


# Ends.


def test_no_key_and_nonce_twice_over_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process recovers, trains on, and is killed anywhere: as `ended` has it, but sealed."""
    count = int(os.environ.get("PENSTOCK_TORTURE_STEPS_KILLED", "3"))
    record = Path(os.environ["PENSTOCK_RECORD_SEALS"])
    begin = record.stat().st_size
    campaign = ended.kills(count, random.Random(f"{SEED} sealed kills"), is_sealed=True)
    sys.stdout.write(f"seed {SEED}, {count} kills: {campaign}\n")
    assert campaign.found.total() == count + 1
    assert record.stat().st_size > begin, "the processes record their seals"
    assert seals.repetitions(record.read_bytes()) == 0
