"""`penstock.offload.TensorIO`: its reads and writes, their paths, and their reports."""

from __future__ import annotations

import os
import random
import threading
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import TransferCancelledError, TransferError
from penstock.io.executors import Choice
from penstock.io.own_io import for_rows
from penstock.offload import DataFile, TensorIO, Transfer, wait_all
from threads import on_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

HANG_SECONDS = 120


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(300_000))
    return path


SETTINGS: list[dict[str, Any]] = [
    {},
    {"direct": "off"},
    {"engine": "threads", "extent_bytes": 4096, "queue_depth": 2, "io_threads": 3},
    {"extent_bytes": 8192, "queue_depth": 1, "io_threads": 1, "staging_bytes": 4 << 20},
]


@pytest.mark.parametrize("kind", [np.int64, np.uint8, torch.tensor])
def test_offsets_may_be_integers_of_other_libraries(file: Path, kind: Any) -> None:
    with TensorIO() as io:
        io.write(b"12345678", file, kind(16)).result(HANG_SECONDS)
        found = bytearray(16)
        io.read(found, file, kind(8)).result(HANG_SECONDS)
        assert bytes(found) == file.read_bytes()[8:24]
        assert found.endswith(b"12345678")


@pytest.mark.quick
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_written_is_read(tmp_path: Path, settings: dict[str, Any]) -> None:
    tensors = [
        torch.randn(100_000),
        torch.randn(300, 200).t(),
        torch.arange(40_000).reshape(200, 200)[3:150, 7:190:2],
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(5000).to(torch.bfloat16),
    ]
    path = tmp_path / "file"
    with TensorIO(**settings) as io:
        offset = 0
        for tensor in tensors:
            report = io.write(tensor, path, offset).result(HANG_SECONDS)
            assert report.nbytes == tensor.nbytes
            offset += tensor.nbytes + 13
        assert path.stat().st_size == offset - 13
        offset = 0
        for tensor in tensors:
            # Into the same strides, and into contiguous memory.
            for into in (torch.zeros_like(tensor), torch.zeros(tensor.shape, dtype=tensor.dtype)):
                assert io.read(into, path, offset).result(HANG_SECONDS).nbytes == tensor.nbytes
                assert torch.equal(into, tensor)
            offset += tensor.nbytes + 13


_place = st.one_of(st.integers(0, 40_000), st.integers(0, 9).map(lambda page: page * 4096))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(_place, st.integers(0, 20_000), st.booleans()), min_size=1, max_size=12),
    st.sampled_from(SETTINGS),
    st.integers(0, 16),
)
def test_writes_and_reads_are_those_of_a_string_of_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    writes: list[tuple[int, int, bool]],
    settings: dict[str, Any],
    behind: int,
) -> None:
    path = tmp_path_factory.mktemp("model") / "file"
    model = bytearray()
    random_bytes = random.Random(len(writes))
    with TensorIO(**settings) as io:
        for offset, size, sync in writes:
            content = random_bytes.randbytes(size)
            # Memory of any alignment.
            held = np.frombuffer(bytes(behind) + content, np.uint8)[behind:]
            io.write(held, path, offset, sync=sync).result(HANG_SECONDS)
            # Like pwrite, an empty write does not extend the file.
            model.extend(bytes(max(0, offset + size - len(model)) if size else 0))
            model[offset : offset + size] = content
        assert path.read_bytes() == model
        for offset, size, _ in writes:
            into = bytearray(size)
            io.read(into, path, offset).result(HANG_SECONDS)
            assert into == model[offset : offset + size]


def test_a_batch_is_one_transfer(file: Path) -> None:
    content = file.read_bytes()
    rows = np.zeros((1024, 64), np.uint8)
    places = [random.Random(2).randrange(len(content) - 64) for _ in rows]
    with TensorIO() as io, io.open(file) as opened:
        batch = io.read_all((row, opened, at) for row, at in zip(rows, places, strict=True))
        assert batch.result(HANG_SECONDS).nbytes == rows.nbytes
    assert all(rows[i].tobytes() == content[at : at + 64] for i, at in enumerate(places))


def test_a_batch_of_writes_to_many_files(tmp_path: Path) -> None:
    parts = [torch.full((1000,), float(i)) for i in range(200)]
    files = [tmp_path / f"{i % 7}" for i in range(200)]
    with TensorIO() as io:
        requests = [(part, files[i], 4000 * (i // 7)) for i, part in enumerate(parts)]
        assert io.write_all(requests, sync=True).result(HANG_SECONDS).nbytes == 200 * 4000
        for part, file, offset in requests:
            into = torch.empty(1000)
            io.read(into, file, offset).result(HANG_SECONDS)
            assert torch.equal(into, part)


def test_a_write_shortens_nothing_and_keeps_what_it_does_not_name(file: Path) -> None:
    content = bytearray(file.read_bytes())
    with TensorIO() as io:
        io.write(b"x" * 100, file, 5000).result(HANG_SECONDS)
    content[5000:5100] = b"x" * 100
    assert file.read_bytes() == content


def test_a_file_that_is_made_has_its_space_reserved(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with TensorIO() as io:
        io.write(torch.zeros(1 << 18), path, 1 << 20).result(HANG_SECONDS)
    status = path.stat()
    assert status.st_size == 2 << 20
    assert status.st_mode & 0o777 == 0o666 & ~_umask()
    # Nothing is written before the offset, but one fallocate reserves space from the start.
    assert status.st_blocks * 512 >= 1 << 20


def _umask() -> int:
    old = os.umask(0)
    os.umask(old)
    return old


def test_a_name_is_made_durable_where_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by resolving its path in a changed working directory; nor if its name is gone."""
    (tmp_path / "directory").mkdir()
    monkeypatch.chdir(tmp_path)
    with TensorIO() as io:
        moved, gone = (io.open(f"directory/{name}", "w") for name in ("moved", "gone"))
        monkeypatch.chdir("/")
        (tmp_path / "directory" / "gone").unlink()
        for file in (moved, gone):
            assert io.write(b"abc", file, sync=True).result(HANG_SECONDS).nbytes == 3
    assert (tmp_path / "directory" / "moved").read_bytes() == b"abc"


def test_links_are_followed(tmp_path: Path, file: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file)
    into = bytearray(100)
    with TensorIO() as io:
        io.read(into, link, 10).result(HANG_SECONDS)
        assert bytes(into) == file.read_bytes()[10:110]
        io.write(b"abc", link).result(HANG_SECONDS)
    assert file.read_bytes()[:3] == b"abc"
    assert link.is_symlink()


def test_a_descriptor_or_a_file_object_is_as_good_as_a_path(file: Path) -> None:
    content = file.read_bytes()
    into = bytearray(1000)
    with TensorIO() as io, file.open("r+b") as opened:
        flags = _flags(opened.fileno())
        io.read(into, opened, 123).result(HANG_SECONDS)
        assert into == content[123:1123]
        io.write(b"abc", opened.fileno(), 5).result(HANG_SECONDS)
        # The caller's descriptor is unchanged.
        assert _flags(opened.fileno()) == flags
        assert opened.tell() == 0
    assert file.read_bytes() == content[:5] + b"abc" + content[8:]


def _flags(descriptor: int) -> str:
    with open(f"/proc/self/fdinfo/{descriptor}") as info:
        return next(line for line in info if line.startswith("flags:"))


def test_files_that_are_gone_when_the_next_comes_are_not_taken_for_it(tmp_path: Path) -> None:
    for index in range(20):
        (tmp_path / str(index)).write_bytes(bytes([index]) * 10)

    def objects() -> Iterator[tuple[bytearray, Any, int]]:
        for index, row in enumerate(rows):
            yield row, (tmp_path / str(index)).open("rb"), 0

    def paths() -> Iterator[tuple[bytearray, Any, int]]:
        for index, row in enumerate(rows):
            yield row, os.fsencode(tmp_path / str(index)), 0

    def descriptors() -> Iterator[tuple[bytearray, Any, int]]:
        for index, row in enumerate(rows):
            with (tmp_path / str(index)).open("rb") as opened:
                yield row, opened.fileno(), 0

    with TensorIO() as io, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for requests in (objects, paths, descriptors):
            rows = [bytearray(10) for _ in range(20)]
            io.read_all(requests()).result(HANG_SECONDS)
            assert [row[0] for row in rows] == list(range(20)), requests


def test_an_open_file_is_used_until_it_is_closed(file: Path) -> None:
    io = TensorIO()
    opened = io.open(file)
    assert isinstance(opened, DataFile)
    assert (opened.path, opened.nbytes, opened.closed) == (os.fspath(file), 300_000, False)
    into = bytearray(200_000)
    transfer = io.read(into, opened)
    opened.close()
    assert transfer.result(HANG_SECONDS).nbytes == 200_000
    assert into == file.read_bytes()[:200_000]
    with pytest.raises(ValueError, match="is closed"):
        io.read(into, opened)
    with pytest.raises(ValueError, match="read only"):
        io.write(into, io.open(file))
    io.close()


def test_reports_tell_the_path_taken(tmp_path: Path) -> None:
    path = tmp_path / "file"
    pages = np.frombuffer(_aligned(1 << 20), np.uint8)
    with TensorIO() as io:
        whole = io.write(pages, path, sync=True).result(HANG_SECONDS)
        is_direct = io.open(path).is_direct
        ragged = io.read(bytearray(1000), path, 7).result(HANG_SECONDS)
    with TensorIO(direct="off", engine="threads") as io:
        cached = io.read(pages, path).result(HANG_SECONDS)
    assert cached.cached_bytes == cached.nbytes == 1 << 20
    assert not cached.direct
    assert cached.engine == "threads"
    assert cached.fallbacks == ()
    if not is_direct:
        assert [fallback.kind for fallback in whole.fallbacks] == ["buffered"]
        return
    assert whole.direct
    assert whole.staged_bytes == 0
    assert ragged.direct
    assert ragged.staged_bytes == 1000
    assert whole.seconds > 0


def _aligned(nbytes: int) -> memoryview:
    held = np.zeros(nbytes + 4096, np.uint8)
    start = -held.ctypes.data % 4096
    return memoryview(held)[start : start + nbytes]


def test_autograd_hears_of_a_read(file: Path) -> None:
    weight = torch.ones(10, requires_grad=True)
    product = (weight * weight).sum()
    with TensorIO() as io:
        io.read(weight, file).result(HANG_SECONDS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_many_threads_share_one(tmp_path: Path) -> None:
    io = TensorIO()

    def work(seed: int) -> None:
        path = tmp_path / f"file-{seed}"
        for turn in range(20):
            content = random.Random(seed * 100 + turn).randbytes(10_000 + seed)
            io.write(content, path, turn * 77).result(HANG_SECONDS)
            into = bytearray(len(content))
            io.read(into, path, turn * 77).result(HANG_SECONDS)
            assert into == content

    on_threads(work, range(8))
    io.close()


def test_memory_is_held_until_the_end_and_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(32 << 20))
    with TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096) as io:
        held = np.zeros(32 << 20, np.uint8)
        alive = weakref.ref(held)
        transfer = io.read(held, path)
        del held
        was_held = alive() is not None
        assert was_held or transfer.done()
        transfer.result(HANG_SECONDS)
        # References dropped outside of the interpreter are released at the next call.
        transfer.done()
        assert alive() is None


def test_memory_is_held_when_a_tensor_gets_another(tmp_path: Path) -> None:
    """Offloading code replaces parameters by empty tensors at once."""
    tensor = torch.full((64 << 20,), 7, dtype=torch.uint8)
    with TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096) as io:
        transfer = io.write(tensor, tmp_path / "file")
        tensor.data = torch.empty(0, dtype=torch.uint8)
        # These would reuse freed memory.
        others = [torch.full((64 << 20,), 9, dtype=torch.uint8) for _ in range(3)]
        transfer.result(HANG_SECONDS)
        del others
        assert (np.fromfile(tmp_path / "file", np.uint8) == 7).all()


def test_of_a_cancelled_transfer_nothing_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = np.zeros(64 << 20, np.uint8)
    outcomes = set()
    with TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096) as io:
        for _ in range(5):
            transfer = io.write(content, path)
            transfer.cancel()
            try:
                transfer.result(HANG_SECONDS)
                outcomes.add("done")
            except TransferCancelledError:
                outcomes.add("cancelled")
            transfer.cancel()
        assert io.read(bytearray(10), path).result(HANG_SECONDS).nbytes == 10
    assert "cancelled" in outcomes


def test_results_can_be_waited_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096) as io:
        transfer = io.write(np.zeros(64 << 20, np.uint8), path)
        with pytest.raises(TimeoutError):
            transfer.result(0)
        with pytest.raises(TimeoutError):
            wait_all([transfer], 0)
        with pytest.raises(ValueError, match="nan"):
            transfer.result(float("nan"))
        assert transfer.result(HANG_SECONDS).nbytes == 64 << 20
        assert transfer.done()


def test_all_are_waited_for_whatever_becomes_of_each(file: Path) -> None:
    with TensorIO() as io:
        good = [io.read(bytearray(1000), file, at) for at in range(10)]
        bad = [io.read(bytearray(1000), file, 299_500 + at) for at in (0, 1)]
        with pytest.raises(TransferError) as caught:
            wait_all([*good[:5], *bad, *good[5:]], HANG_SECONDS)
        assert all(one.done() for one in good)
        assert len(caught.value.__notes__) == 1
        assert [report.nbytes for report in wait_all(good)] == [1000] * 10


def test_an_error_that_nobody_has_seen_comes_at_the_end(file: Path) -> None:
    io = TensorIO()
    io.read(bytearray(10), file, 400_000)
    with pytest.raises(TransferError):
        io.close()
    # A failure that was raised once is not raised again, and another exception takes precedence.
    with TensorIO() as io, pytest.raises(TransferError):
        io.read(bytearray(10), file, 400_000).result(HANG_SECONDS)
    with pytest.raises(KeyError):
        _leave(file)


def test_no_failure_is_lost_among_threads(file: Path) -> None:
    """A wait forgets finished transfers only, not those that other threads submit meanwhile."""
    threads, turns = 4, 2000
    heard = 0
    with TensorIO() as io:

        def fail() -> None:
            for _ in range(turns):
                io.read(bytearray(10), file, 400_000)

        running = [threading.Thread(target=fail) for _ in range(threads)]
        for thread in running:
            thread.start()
        is_last = False
        while not is_last:
            is_last = not any(thread.is_alive() for thread in running)
            try:
                io.wait(HANG_SECONDS)
            except TransferError as error:
                heard += 1 + len(getattr(error, "__notes__", ()))
    assert heard == threads * turns


def _leave(file: Path) -> None:
    with TensorIO() as io:
        io.read(bytearray(10), file, 400_000)
        raise KeyError


def test_those_with_the_same_settings_share_their_threads(file: Path) -> None:
    def workers() -> int:
        tasks = os.listdir("/proc/self/task")
        names = [Path(f"/proc/self/task/{task}/comm").read_text() for task in tasks]
        return sum(name.startswith("penstock-exec") for name in names)

    one = TensorIO(extent_bytes=12288)
    one.read(bytearray(10), file).result(HANG_SECONDS)
    before = workers()
    assert before
    others = [TensorIO(extent_bytes=12288, weight=weight) for weight in (1, 2, 3)]
    for io in [one, *others]:
        io.read(bytearray(10), file).result(HANG_SECONDS)
    assert workers() == before
    for io in [one, *others]:
        io.close()


def test_the_environment_decides_what_is_not_given(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_ENGINE", "threads")
    monkeypatch.setenv("PENSTOCK_DIRECT", "off")
    with TensorIO() as io:
        report = io.read(bytearray(8192), file).result(HANG_SECONDS)
    assert report.engine == "threads"
    assert report.cached_bytes == 8192


def test_transfers_say_what_they_are(file: Path) -> None:
    with TensorIO() as io:
        transfer = io.read(bytearray(10), file)
        transfer.result(HANG_SECONDS)
        assert isinstance(transfer, Transfer)
        assert repr(transfer) == "<Transfer done>"
        assert repr(io.open(file)) == f"<DataFile {os.fspath(file)!r}>"


def test_what_is_not_given_suits_the_device_of_the_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given settings are kept; the staging memory bounds the rest."""
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    with TensorIO() as io, io.open(path) as file:
        block_bytes, blocks, workers = file._opened.suited
        assert block_bytes % 4096 == 0
        assert workers <= len(os.sched_getaffinity(0))
        chosen = Choice.of(None).settings(file._opened)
        assert (chosen.extent_bytes, chosen.queue_depth) == (block_bytes, 4 * blocks)
        assert (chosen.in_flight_bytes, chosen.io_threads) == (blocks * block_bytes, workers)
        rows = for_rows()._choice.settings(file._opened)
        is_direct = file._opened.direct
        half = max(1, len(os.sched_getaffinity(0)) // 2)
        assert rows.io_threads == (min(workers, half) if is_direct else workers)
        monkeypatch.setenv("PENSTOCK_EXTENT_BYTES", str(8 << 20))
        monkeypatch.setenv("PENSTOCK_IO_THREADS", "3")
        given = Choice.of(None, queue_depth=5).settings(file._opened)
        assert (given.extent_bytes, given.queue_depth, given.io_threads) == (8 << 20, 5, 3)
        assert given.in_flight_bytes == 5 * given.extent_bytes
        assert for_rows()._choice.settings(file._opened).io_threads == 3
        array: Any = SimpleNamespace(suited=(6 << 20, 32, 4))
        monkeypatch.undo()
        for staging_bytes, expected in ((None, 6 << 20), (4 << 20, 2 << 20)):
            bounded = Choice.of(None, staging_bytes=staging_bytes).settings(array)
            assert bounded.extent_bytes == expected


@pytest.mark.parametrize("length", [0, 50, 8192])
def test_no_bytes_beyond_the_end_leave_the_file_as_long_as_it_is(
    tmp_path: Path, length: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(length))
    with TensorIO() as io:
        io.write(torch.empty(0), path, offset=100_000).result()
        io.write_all([(torch.empty(0), path, 1 << 40), (torch.ones(2), path, 16)]).result()
    assert path.stat().st_size == max(length, 24)
