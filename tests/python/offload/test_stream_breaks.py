"""`penstock.offload.stream` with interrupted calls, changed files, and copied models."""

from __future__ import annotations

import copy
import itertools
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import CONFIGS, logits
from models import least, saved
from safetensors.torch import save_file
from towers import Tower, copy_of

import penstock
from penstock import offload
from penstock.errors import CorruptCheckpointError, UnsupportedStateError
from penstock.offload import streaming

HANG_SECONDS = 60
ROOM_BYTES = 72_000
SOURCES = str(Path(streaming.__file__).parent)


@pytest.fixture
def tower(tmp_path: Path) -> tuple[Tower, Path]:
    """Returns a model in memory, and its directory, with a file for each parameter."""
    torch.manual_seed(1)
    model = Tower()
    directory = tmp_path / "tower"
    directory.mkdir()
    for name, one in model.named_parameters():
        save_file({name: one.detach()}, directory / f"{name}.safetensors")
    return model, directory


def in_time(work: Any) -> Any:
    """Returns the result of some work; fails if it hangs.

    Uses the caller's number of threads, on which the last bits of MKL's products depend.
    """
    found: list[Any] = []
    count = torch.get_num_threads()

    def run() -> None:
        torch.set_num_threads(count)
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert found, "it hangs"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


# ---- Ctrl-C


def broken_off(work: Any, at: int) -> bool:
    """Interrupts work at the n-th call of a Penstock function; returns whether it got there.

    The interpreter checks for signals there, and not at the release of a lock.
    """
    events = itertools.count()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        is_ours = event == "call" and code.co_filename.startswith(SOURCES)
        # Exceptions raised while a generator is discarded are swallowed.
        if is_ours and code.co_name not in ("<genexpr>", "each") and next(events) == at:
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def check_it_works_on(streamed: Any, model: Any, *, step: int) -> int:
    """Interrupts calls one by one at later points; returns the number of interrupted calls."""
    for at in itertools.count(1, step):
        was_broken_off = broken_off(streamed, at)
        for _ in range(2):
            assert torch.equal(streamed(), model), at
        if not was_broken_off:
            return at // step
    raise AssertionError


def test_a_call_that_ctrl_c_ends_leaves_nothing_behind(tower: tuple[Tower, Path]) -> None:
    """In the model's own code, which PyTorch reports to no hook."""
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=ROOM_BYTES)
    x = torch.randn(2, 32)

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = streamed.blocks[1][0].register_forward_pre_hook(end)
    with torch.inference_mode():
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                in_time(lambda: streamed(x))
            assert torch.equal(in_time(lambda: streamed(x, (3, 4, 3))), model(x, (3, 4, 3)))
        hook.remove()
        assert torch.equal(in_time(lambda: streamed(x)), model(x))


def test_ctrl_c_may_come_wherever_it_likes(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=ROOM_BYTES)
    x = torch.randn(2, 32)

    def work() -> int:
        with torch.inference_mode():
            streamed(x)
            return check_it_works_on(lambda: streamed(x), model(x), step=7)

    assert in_time(work) > 10


def test_ctrl_c_may_come_while_experts_do(tmp_path: Path) -> None:
    model = saved(tmp_path, CONFIGS["mixtral"]())
    streamed = offload.stream(tmp_path, memory_bytes=least(tmp_path))
    tokens = torch.randint(3, 200, (2, 7), generator=torch.Generator().manual_seed(3))
    expected = logits(model, tokens)
    assert in_time(lambda: check_it_works_on(lambda: logits(streamed, tokens), expected, step=61))


# ---- Files


def test_a_file_that_is_gone_before_it_was_opened(tower: tuple[Tower, Path]) -> None:
    """Each call that needs it raises at once; it works again once the file is back."""
    model, directory = tower
    # In a directory of its own, as a moved file itself counts as changed.
    path, parts = directory / "blocks.3.0.weight.safetensors", directory.parent / "parts"
    parts.mkdir()
    path.rename(parts / path.name)
    path.symlink_to(parts / path.name)
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=ROOM_BYTES)
    x = torch.randn(2, 32)
    parts.rename(directory.parent / "away")
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(in_time(lambda: streamed(x)), model(x))
            with pytest.raises(CorruptCheckpointError, match="is gone since") as caught:
                in_time(lambda: streamed(x, (2, 3)))
            assert (caught.value.tensor, caught.value.file) == ("blocks.3.0.weight", path.name)
        (directory.parent / "away").rename(parts)
        assert torch.equal(in_time(lambda: streamed(x, (2, 3))), model(x, (2, 3)))


def put_back(path: Path, change: Any) -> None:
    """Changes a file, then restores its modification time like rsync and tar."""
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_change_whose_time_is_put_back_is_found(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=ROOM_BYTES)
    x = torch.randn(2, 32)

    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\x00\x00\x80\x3f")

    with torch.inference_mode():
        assert torch.equal(in_time(lambda: streamed(x)), model(x))
        # Some blocks stay in memory, so a single file might not be read again.
        for path in directory.iterdir():
            put_back(path, lambda path=path: change(path))
        with pytest.raises(CorruptCheckpointError, match="the old one") as caught:
            in_time(lambda: streamed(x))
    assert caught.value.tensor is not None


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_new_name_hides_no_change(
    tower: tuple[Tower, Path], tmp_path: Path, is_changed: bool
) -> None:
    """Without digests a new name looks the same as a change that it hides."""
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=ROOM_BYTES)
    x = torch.randn(2, 32)

    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\x00\x00\x80\x3f")

    with torch.inference_mode():
        assert torch.equal(in_time(lambda: streamed(x)), model(x))
        # All files: some weights are resident, and not read again.
        for path in directory.glob("*.safetensors"):
            if is_changed:
                put_back(path, lambda path=path: change(path))
            os.link(path, tmp_path / path.name)
        with pytest.raises(CorruptCheckpointError, match=r"a name \(a hard link\)"):
            in_time(lambda: streamed(x))


def test_names_of_a_checkpoint_come_and_go(tmp_path: Path) -> None:
    """Exports and retention add and remove names; digests show that nothing else has changed."""
    torch.manual_seed(1)
    model, x = Tower(), torch.randn(2, 32)
    penstock.save(tmp_path / "a", {"model": model.state_dict()})
    path, other = next((tmp_path / "a").glob("shard-*")), tmp_path / "another.name"
    streamed = offload.stream(copy_of(model), weights=tmp_path / "a", memory_bytes=ROOM_BYTES)
    with torch.inference_mode():
        os.link(path, other)
        assert torch.equal(in_time(lambda: streamed(x)), model(x))
        other.unlink()
        assert torch.equal(in_time(lambda: streamed(x)), model(x))


def test_weights_of_a_checkpoint_are_compared_again_once_a_file_was_touched(tmp_path: Path) -> None:
    """Digests tell damage from changed permissions."""
    torch.manual_seed(1)
    model, x = Tower(), torch.randn(2, 32)
    penstock.save(tmp_path / "a", {"model": model.state_dict()})
    path = next((tmp_path / "a").glob("shard-*"))
    streamed = offload.stream(copy_of(model), weights=tmp_path / "a", memory_bytes=ROOM_BYTES)
    content = path.read_bytes()

    def change(content: bytes) -> None:
        with path.open("r+b") as file:
            file.write(content)

    def run() -> Any:
        return in_time(lambda: streamed(x))

    with torch.inference_mode():
        assert torch.equal(run(), model(x))
        path.chmod(0o640)
        assert torch.equal(run(), model(x))
        put_back(path, lambda: change(content[:4096] + bytes(len(content) - 4096)))
        with pytest.raises(CorruptCheckpointError):
            run()
        put_back(path, lambda: change(content))
        assert torch.equal(run(), model(x))


# ---- Uses of the output


class Table(torch.nn.Module):
    """Like the positional embeddings of speech models."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3000, 32))

    def forward(self, count: int) -> dict[str, list[torch.Tensor]]:
        return {"rows": [self.weight[:count], self.weight[:count, :1].expand(-1, 32)]}


class Tables(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(Table() for _ in range(4))
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [one for table in self.tables for one in table(len(x))["rows"]]
        for block in self.blocks:
            x = block(x)
        return x + sum(rows)


def test_what_a_call_returns_of_its_weights_lasts(tmp_path: Path) -> None:
    """The next weights would overwrite that memory before the caller uses it."""
    torch.manual_seed(1)
    model, x = Tables(), torch.randn(2000, 32)
    save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    streamed = offload.stream(copy.deepcopy(model), weights=tmp_path, memory_bytes=400_000)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(streamed(x), model(x))


def test_a_model_is_streamed_once(tower: tuple[Tower, Path]) -> None:
    """Streamed again from other files, it would go on to read the first ones."""
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=ROOM_BYTES)
    for again in (streamed, torch.nn.Sequential(streamed), streamed.blocks):
        with pytest.raises(UnsupportedStateError, match="is streamed already"):
            offload.stream(again, weights=directory, memory_bytes=ROOM_BYTES)
    x = torch.randn(2, 32)
    with torch.inference_mode():
        assert torch.equal(streamed(x), model(x))


def test_a_parameter_that_was_replaced_is_not_forgotten(tower: tuple[Tower, Path]) -> None:
    model, directory = tower
    streamed = offload.stream(copy_of(model), weights=directory, memory_bytes=ROOM_BYTES)
    x = torch.randn(2, 32)
    other = {"blocks.1.0.weight": torch.zeros(200, 32)}
    with torch.inference_mode():
        for _ in range(2):
            with pytest.raises(UnsupportedStateError, match="was replaced") as caught:
                torch.func.functional_call(streamed, other, (x,))
            assert caught.value.key == "blocks.1.0.weight"
            assert torch.equal(streamed(x), model(x))
