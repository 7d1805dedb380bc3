"""`penstock.features.open_indexed`: rows of different lengths, by id."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from indexed import CODES, rows_of, write_indexed
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    PenstockError,
    StateMismatchError,
    UnsupportedStateError,
)
from penstock.features import open_indexed
from penstock.features.indexed.range_file import RangeFile
from penstock.offload import TensorIO
from penstock_bench.harness.storage import drop, resident_pages, sync_file

LENGTHS = st.lists(st.integers(0, 40) | st.integers(0, 9000), min_size=1, max_size=30)


@given(
    lengths=LENGTHS,
    dtype=st.sampled_from(sorted(CODES)),
    is_multimodal=st.booleans(),
    is_direct=st.booleans(),
    gap_bytes=st.sampled_from([None, 0, 1 << 20]),
    data=st.data(),
)
def test_rows_are_those_that_were_written(
    tmp_path_factory, lengths, dtype, is_multimodal, is_direct, gap_bytes, data
):
    rows = rows_of(lengths, dtype)
    modes = [at % 3 for at in range(len(rows))] if is_multimodal else None
    prefix = write_indexed(tmp_path_factory.mktemp("indexed") / "texts", rows, dtype, modes=modes)
    io = TensorIO(direct="auto" if is_direct else "off")
    with open_indexed(prefix, multimodal=is_multimodal, gap_bytes=gap_bytes, io=io) as texts:
        assert len(texts) == len(rows)
        assert texts.dtype == dtype
        assert texts.sequence_lengths.tolist() == lengths
        assert texts.document_indices.tolist() == list(range(len(rows) + 1))
        assert (texts.sequence_modes is None) is not is_multimodal
        ids = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=40), label="ids")
        starts = [data.draw(st.integers(0, lengths[one])) for one in ids]
        counts = [
            data.draw(st.integers(0, lengths[one] - start))
            for one, start in zip(ids, starts, strict=True)
        ]
        expected = [
            rows[one][start : start + count]
            for one, start, count in zip(ids, starts, counts, strict=True)
        ]
        for given_ids in (ids, np.array(ids, np.int32), torch.tensor(ids, dtype=torch.int64)):
            found = texts.gather(given_ids, starts=starts, lengths=counts)
            assert isinstance(found.values, torch.Tensor) is isinstance(given_ids, torch.Tensor)
            assert found.offsets.tolist() == np.cumsum([0, *counts]).tolist()
            for row, one in zip(found.rows(), expected, strict=True):
                assert np.array_equal(np.asarray(row), one)
        whole = texts.gather(ids)
        assert np.array_equal(
            whole.values, np.concatenate([*(rows[one] for one in ids), rows[0][:0]])
        )
        one = data.draw(st.integers(-len(rows), len(rows) - 1), label="one")
        row = texts[one]
        if modes is not None:
            row, mode = row
            assert mode == modes[one]
        assert row.dtype == dtype
        assert np.array_equal(row, rows[one])
        some = texts[1:5] if modes is None else texts[1:5][0]
        assert [row.tolist() for row in some] == [row.tolist() for row in rows[1:5]]


def test_a_stream_yields_batches_in_order_and_then_the_error(tmp_path):
    rows = rows_of([10, 0, 3000, 7, 8], "int32")
    batches = [[0, 2], [], [4, 4], np.array([1, 3]), [5], [0]]
    with open_indexed(write_indexed(tmp_path / "texts", rows, "int32")) as texts:
        for ahead_bytes in (0, 1 << 20):
            found = []
            with pytest.raises(IndexError, match=r"ids\[0\] is 5: .*texts has rows 0 to 4"):
                found.extend(texts.stream(batches, ahead_bytes=ahead_bytes))
            assert [list(ids) for ids, _ in found] == [list(ids) for ids in batches[:4]]
            for ids, ragged in found:
                for one, row in zip(ids, ragged.rows(), strict=True):
                    assert np.array_equal(row, rows[one])


def test_neighbours_are_one_request(tmp_path):
    rows = rows_of([500] * 64, "uint16")
    with open_indexed(write_indexed(tmp_path / "texts", rows, "uint16")) as texts:
        texts.gather(np.arange(64))
        stats = texts.stats()
        assert (stats.rows, stats.requests, stats.read_bytes) == (64, 1, 64_000)
        texts.gather([3, 3, 3])
        assert texts.stats().read_bytes == 65_000


def _read_elsewhere(texts, queue):
    queue.put([row.tolist() for row in texts.gather([2, 0]).rows()])


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_other_processes_read(tmp_path, way):
    rows = rows_of([5, 6, 40_000], "int64")
    with open_indexed(write_indexed(tmp_path / "texts", rows, "int64")) as texts:
        texts.gather([0])
        context = multiprocessing.get_context(way)
        queue = context.Queue()
        child = context.Process(target=_read_elsewhere, args=(texts, queue))
        child.start()
        assert queue.get(timeout=120) == [rows[2].tolist(), rows[0].tolist()]
        child.join()
        assert texts.gather([1]).values.tolist() == rows[1].tolist()


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("change", ["write", "truncate", "replace", "remove"])
def test_a_file_that_changes_while_it_is_open_is_an_error(tmp_path, suffix, change):
    prefix = write_indexed(tmp_path / "texts", rows_of([5, 6, 40_000], "int64"), "int64")
    path = prefix + suffix
    with open_indexed(prefix) as texts:
        texts.gather([2])
        copy = pickle.dumps(texts)
        content = Path(path).read_bytes()
        if change == "write":
            with open(path, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"\x05")
            os.utime(path, ns=(1, 1))
        elif change == "truncate":
            os.truncate(path, 0)
        else:
            os.remove(path)
            if change == "replace":
                Path(path).write_bytes(content)
        with pytest.raises(CorruptCheckpointError, match="since the dataset was opened") as caught:
            texts.gather([2])
        assert caught.value.file == os.path.basename(path)
        with pytest.raises(PenstockError, match=r"texts\."):
            pickle.loads(copy)


def test_another_working_directory_changes_nothing(tmp_path, monkeypatch):
    rows = rows_of([5, 6, 40_000], "int64")
    write_indexed(tmp_path / "texts", rows, "int64")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with open_indexed("texts") as texts:
        assert texts.prefix == str(tmp_path / "texts")
        copy = pickle.dumps(texts)
        monkeypatch.chdir("elsewhere")
        assert np.array_equal(texts[2], rows[2])
        with pickle.loads(copy) as other:
            assert np.array_equal(other[1], rows[1])
        child = multiprocessing.get_context("fork")
        queue = child.Queue()
        process = child.Process(target=_read_elsewhere, args=(texts, queue))
        process.start()
        assert queue.get(timeout=120) == [rows[2].tolist(), rows[0].tolist()]
        process.join()


@pytest.mark.parametrize("extent_bytes", [4096, 8192])
def test_requests_without_room_for_partial_blocks_are_refused(tmp_path, extent_bytes):
    rows = rows_of([5, 6, 40_000], "int64")
    prefix = write_indexed(tmp_path / "texts", rows, "int64")
    with pytest.raises(UnsupportedStateError, match=r"need 12288.*extent_bytes") as caught:
        open_indexed(prefix, io=TensorIO(extent_bytes=extent_bytes))
    assert caught.value.key == f"{prefix}.bin"
    with open_indexed(prefix, io=TensorIO(extent_bytes=12288)) as texts:
        for found, row in zip(texts.gather([0, 1, 2]).rows(), rows, strict=True):
            assert np.array_equal(found, row)


def test_a_cut_data_file_is_not_read_behind_its_end(tmp_path):
    prefix = write_indexed(tmp_path / "texts", rows_of([5, 6, 7], "int64"), "int64")
    os.truncate(f"{prefix}.bin", 100)
    with open_indexed(prefix) as texts:
        assert len(texts.gather([0, 1]).values) == 11
        with pytest.raises(
            CorruptCheckpointError, match=r"row 2 has 7 elements at byte 88.* 100 b"
        ):
            texts.gather([0, 2])


@pytest.mark.parametrize("pointer", [-1, -(1 << 63), (1 << 63) - 1, 97])
def test_pointers_outside_of_the_data_are_refused(tmp_path, pointer):
    prefix = write_indexed(
        tmp_path / "texts", rows_of([5, 7], "int64"), "int64", pointers=[0, pointer]
    )
    with open_indexed(prefix) as texts:
        assert len(texts[0]) == 5
        with pytest.raises(CorruptCheckpointError, match="row 1 has 7 elements") as caught:
            texts.get(1, 0, 1)
        assert caught.value.file == "texts.idx"


def _set(content, offset, form, value):
    return content[:offset] + struct.pack(form, value) + content[offset + struct.calcsize(form) :]


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda content: b"", StateMismatchError, "is no index"),
        (lambda content: b"TNTIDX\x00\x00" + content[8:], StateMismatchError, "is no index"),
        (lambda content: content[:20], CorruptCheckpointError, "fewer than a header"),
        (lambda content: content[:-1], CorruptCheckpointError, "take 94 bytes, and it has 93"),
        (lambda content: _set(content, 9, "<Q", 2), FormatVersionError, "version 2"),
        (lambda content: _set(content, 17, "<B", 9), FormatVersionError, "element type 9"),
        (lambda content: _set(content, 18, "<Q", 1 << 63), CorruptCheckpointError, "rows and"),
        (lambda content: _set(content, 26, "<Q", 0), CorruptCheckpointError, "there are none"),
        (lambda content: _set(content, 86, "<q", 4), CorruptCheckpointError, "end with 4"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path, change, error, told):
    prefix = write_indexed(
        tmp_path / "texts", rows_of([5, 6, 7], "uint8"), "uint8", documents=[0, 1, 3]
    )
    path = tmp_path / "texts.idx"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(error, match=told) as caught:
        open_indexed(prefix)
    assert str(path) in str(caught.value)


def test_a_plain_index_is_not_taken_for_a_multimodal_one(tmp_path):
    prefix = write_indexed(tmp_path / "texts", rows_of([5, 6], "uint8"), "uint8")
    with pytest.raises(CorruptCheckpointError, match="multimodal=True"):
        open_indexed(prefix, multimodal=True)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match=r"texts\.idx"):
        open_indexed(tmp_path / "texts")
    prefix = write_indexed(tmp_path / "texts", rows_of([5], "uint8"), "uint8")
    os.remove(f"{prefix}.bin")
    with pytest.raises(CheckpointNotFoundError, match=r"texts\.bin"):
        open_indexed(prefix)


@pytest.mark.parametrize(
    ("ids", "parts", "error", "told"),
    [
        ([0, 3], {}, IndexError, r"ids\[1\] is 3: .*texts has rows 0 to 2"),
        ([-1], {}, IndexError, r"ids\[0\] is -1"),
        (np.array([1 << 63], np.uint64), {}, IndexError, r"ids\[0\] is 9223372036854775808"),
        ([1], {"starts": 7}, IndexError, "of a row of 6"),
        ([0, 1], {"lengths": [5, 7]}, IndexError, r"ids\[1\] is 1: elements 0 to 7 of a row of 6"),
        ([0], {"starts": -1}, IndexError, "elements -1 to"),
        ([0], {"lengths": -1}, IndexError, "of a row of 5"),
        ([0], {"starts": [0, 1]}, ValueError, "starts: of the shape"),
        ([0], {"lengths": 1.5}, TypeError, "lengths: float64"),
        ([0.5], {}, TypeError, "ids: float64"),
        ([[0]], {}, ValueError, "one dimension"),
    ],
)
def test_what_the_dataset_does_not_have_is_refused(tmp_path, ids, parts, error, told):
    prefix = write_indexed(tmp_path / "texts", rows_of([5, 6, 7], "uint8"), "uint8")
    with open_indexed(prefix) as texts:
        with pytest.raises(error, match=told):
            texts.gather(ids, **parts)
        assert texts.stats().rows == 0


def test_a_closed_dataset_says_so(tmp_path):
    texts = open_indexed(write_indexed(tmp_path / "texts", rows_of([5], "uint8"), "uint8"))
    texts.close()
    texts.close()
    with pytest.raises(ValueError, match="closed"):
        texts.gather([0])
    assert "closed" in repr(texts)


def test_an_empty_dataset_has_no_rows(tmp_path):
    with open_indexed(write_indexed(tmp_path / "texts", [], "uint8")) as texts:
        assert len(texts) == 0
        assert texts.gather([]).values.size == 0
        with pytest.raises(IndexError, match="has no rows"):
            texts.gather([0])


def test_a_look_at_the_page_cache_reads_no_more_than_was_asked_for(disk_path):
    prefix = write_indexed(disk_path / "texts", rows_of([1 << 20], "int32"), "int32")
    path = Path(f"{prefix}.bin")
    content = np.fromfile(path, np.int32)
    file = RangeFile(str(path))
    ranges = np.array([[40, 48], [1 << 21, (1 << 21) + 4000]], np.uint64)
    out = np.empty(1002, np.int32)
    if not file.copy_cached(ranges, out):
        pytest.skip("this file system does not tell whether the page cache has a page")
    at = 1 << 19
    assert out.tolist() == [*content[10:12], *content[at : at + 1000]]
    sync_file(path)
    drop([path])
    if resident_pages([path])[0]:
        pytest.skip("this file system keeps the file in the page cache")
    assert not file.copy_cached(ranges, out)
    # A reader of whole files would get some hundred KB, up to some MB, beside the first range.
    assert resident_pages([path])[0] <= 2
    os.truncate(path, 100)
    assert not file.copy_cached(ranges, out)
    path.write_bytes(content.tobytes())
    with pytest.raises(CorruptCheckpointError, match="has changed"):
        file.copy_cached(ranges, out)
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.copy_cached(ranges, out)


def look(file):
    """The first two elements through the page cache; None if they are not read."""
    out = np.empty(2, np.int32)
    return out.tolist() if file.copy_cached(np.array([[0, 8]], np.uint64), out) else None


def write_versions(directory, count=2):
    """Directories of versions of a dataset that look alike: the elements are their numbers."""
    for version in range(1, count + 1):
        (directory / f"v{version}").mkdir()
        row = np.full(1000, version, np.int32)
        write_indexed(directory / f"v{version}" / "texts", [row], "int32")


def point_to(directory, version):
    (directory / "new").symlink_to(f"v{version}")
    os.replace(directory / "new", directory / "current")


def test_a_version_that_the_path_led_to_meanwhile_is_not_read(tmp_path):
    write_versions(tmp_path)
    point_to(tmp_path, 1)
    file = RangeFile(str(tmp_path / "current" / "texts.bin"))
    point_to(tmp_path, 2)
    assert look(file) is None
    with pytest.raises(CorruptCheckpointError, match="has changed"):
        file.check()
    point_to(tmp_path, 1)
    assert look(file) in ([1, 1], None)


@pytest.mark.parametrize("change", ["opened by another thread", "closed"])
def test_a_copy_under_way_keeps_its_file(tmp_path, monkeypatch, change):
    write_versions(tmp_path)
    file = RangeFile(str(tmp_path / "v1" / "texts.bin"))
    if look(file) is None:
        pytest.skip("this file system does not tell whether the page cache has a page")
    file = RangeFile(str(tmp_path / "v1" / "texts.bin"))
    opens, may_open, may_copy = (threading.Event() for _ in range(3))
    copies = threading.Semaphore(0)
    advise, preadv = os.posix_fadvise, os.preadv

    def advising(*its):
        opens.set()
        may_open.wait(10)
        advise(*its)

    def copying(*its):
        copies.release()
        may_copy.wait(10)
        return preadv(*its)

    monkeypatch.setattr(os, "preadv", copying)
    with ThreadPoolExecutor(2) as threads:
        if change == "closed":
            found = [threads.submit(look, file)]
            assert copies.acquire(timeout=10)
            file.close()
        else:
            monkeypatch.setattr(os, "posix_fadvise", advising)
            found = [threads.submit(look, file)]
            assert opens.wait(10)
            monkeypatch.setattr(os, "posix_fadvise", advise)
            found.append(threads.submit(look, file))
            # The second thread waits for the first one, or it has opened the file itself.
            is_there = copies.acquire(timeout=0.2)
            may_open.set()
            for _ in range(1 if is_there else 2):
                assert copies.acquire(timeout=10)
        # It would get the number of a file that was closed meanwhile.
        with (tmp_path / "v2" / "texts.bin").open("rb"):
            may_copy.set()
            assert [one.result(10) for one in found] == [[1, 1]] * len(found)
    if change == "closed":
        with pytest.raises(ValueError, match="is closed"):
            look(file)
