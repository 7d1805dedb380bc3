"""Readers of `penstock.integrations.dlio`: bytes as NumPy and DLIO read them, or a named error."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("dlio_benchmark", reason="DLIO has its own environment: scripts/dlio test")

from dlio_benchmark.common.enumerations import (
    DataLoaderSampler,
    DatasetType,
    ReadType,
)
from dlio_benchmark.utils.config import ConfigArguments
from dlio_benchmark.utils.utility import DLIOMPI

from penstock.errors import (
    CorruptCheckpointError,
    StorageError,
    TransferError,
    UnsupportedStateError,
)
from penstock.integrations.dlio import IndexedBinaryReader, readers
from penstock.integrations.dlio.array_files import ArrayFiles

ARRAYS = {
    "bytes": np.arange(250, dtype=np.uint8).reshape(5, 25, 2),
    "column by column": np.asfortranarray(np.arange(60.0).reshape(5, 12)),
    "numbers of 2 bytes": np.arange(3000, dtype=np.float16).reshape(30, 100),
    "no element": np.empty((0, 4), np.float32),
    "one number": np.array(7.5),
    "some MiB": np.arange(3 << 19, dtype=np.uint32).reshape(3, -1, 2),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=list(ARRAYS))
@pytest.mark.parametrize("save", [np.save, np.savez, np.savez_compressed])
def test_arrays_come_back(disk_path, array, save):
    path = str(disk_path / "file")
    if save is np.save:
        np.save(path, array)
        found = ArrayFiles().npy(f"{path}.npy")
    else:
        save(path, y=np.arange(9), x=array)
        found = ArrayFiles().npz(f"{path}.npz", "x")
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)


def test_memory_is_used_again(disk_path):
    path = str(disk_path / "file.npy")
    np.save(path, ARRAYS["some MiB"])
    files = ArrayFiles()
    addresses = {files.npy(path).__array_interface__["data"][0] for _ in range(4)}
    assert len(addresses) == 1


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(200)


def begin_otherwise(path):
    with open(path, "r+b") as file:
        file.write(b"not NumPy's")


def empty(path):
    open(path, "w").close()


@pytest.mark.parametrize("damage", [cut, begin_otherwise, empty], ids=lambda one: one.__name__)
@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_a_damaged_file_is_named(disk_path, damage, kind):
    path = str(disk_path / f"file.{kind}")
    (np.save if kind == "npy" else np.savez)(path, np.arange(4000))
    damage(path)
    files = ArrayFiles()
    with pytest.raises(CorruptCheckpointError, match=r"file\.np.*generate the data again"):
        files.npy(path) if kind == "npy" else files.npz(path, "arr_0")


def test_a_changed_byte_of_an_archive_is_found(disk_path):
    path = str(disk_path / "file.npz")
    np.savez(path, x=np.zeros(5000, np.uint8))
    with open(path, "r+b") as file:
        file.seek(3000)
        file.write(b"\1")
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        ArrayFiles().npz(path, "x")


def test_files_that_cannot_be_read_say_why(disk_path):
    path = str(disk_path / "file.npy")
    with pytest.raises(StorageError, match=r"file\.npy"):
        ArrayFiles().npy(path)
    np.save(path, np.array([object()]), allow_pickle=True)
    with pytest.raises(UnsupportedStateError, match="Python objects"):
        ArrayFiles().npy(path)
    archive = str(disk_path / "file.npz")
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_BZIP2) as file:
        file.write(path, "x.npy")
    with pytest.raises(UnsupportedStateError, match="method 12"):
        ArrayFiles().npz(archive, "x")
    np.savez(archive, other=np.zeros(3))
    with pytest.raises(CorruptCheckpointError, match=r"no \.npz file with x"):
        ArrayFiles().npz(archive, "x")


SAMPLES, SAMPLE_BYTES, BATCH = 12, 3000, 4


@pytest.fixture
def path(disk_path):
    """A file of samples of random bytes, with its indices."""
    data = np.random.default_rng(5).integers(0, 256, SAMPLES * SAMPLE_BYTES, np.uint8)
    path = str(disk_path / "img.indexed_binary")
    data.tofile(path)
    (np.arange(SAMPLES) * SAMPLE_BYTES).tofile(f"{path}.off.idx")
    np.full(SAMPLES, SAMPLE_BYTES).tofile(f"{path}.sz.idx")
    return path


def reader_of(path, samples=SAMPLES):
    """A reader as DLIO makes it, with the settings that it looks at."""
    DLIOMPI.get_instance().initialize()
    args = ConfigArguments.get_instance()
    args.num_samples_per_file = samples
    args.batch_size = BATCH
    args.read_type = ReadType.ON_DEMAND
    args.preprocess_time = 0.0 if hasattr(args, "preprocess_time_stdev") else {}
    args.data_loader_sampler = DataLoaderSampler.INDEX
    order = np.random.default_rng(1).permutation(samples)
    args.train_global_index_map = {n: (path, int(index)) for n, index in enumerate(order)}
    args.train_file_map = {}
    args.resized_image = np.zeros(1)
    return IndexedBinaryReader(DatasetType.TRAIN, 0, 1)


def test_samples_are_read_a_batch_at_a_time(path):
    reader = reader_of(path)
    data = np.fromfile(path, np.uint8).reshape(SAMPLES, SAMPLE_BYTES)
    taken = []
    start = reader._start

    def noted(filename, index):
        taken.append((index, start(filename, index)))
        return taken[-1][1]

    reader._start = noted
    for number in range(SAMPLES):
        reader.read_index(number, 1)
        assert len(taken) == BATCH * (number // BATCH + 1)
    for index, (sample, _) in taken:
        assert np.array_equal(sample, data[index])
    assert sorted(index for index, _ in taken) == list(range(SAMPLES))


def open_files(directory):
    """The data files of a directory that this process has open."""
    found = {os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()}
    return [one for one in found if one.startswith(os.path.realpath(directory))]


@pytest.mark.parametrize("batch", [BATCH, 2 * readers._OPEN_FILES_MAX])
def test_of_many_files_few_are_open(path, disk_path, batch):
    reader = reader_of(path)
    data = np.fromfile(path, np.uint8).reshape(SAMPLES, SAMPLE_BYTES)
    files = [f"{path}.{number}" for number in range(4 * readers._OPEN_FILES_MAX)]
    for one in files:
        os.link(path, one)
    reader.batch_size = batch
    reader.global_index_map = {n: (one, n % SAMPLES) for n, one in enumerate(files)}
    reader.file_map_ibr = dict.fromkeys(files, reader.file_map_ibr[path])
    taken = []
    start = reader._start

    def noted(filename, index):
        taken.append((index, start(filename, index)))
        # A file that is closed while it is read stays open for the rest of that read.
        assert len(open_files(disk_path)) < 2 * readers._OPEN_FILES_MAX
        return taken[-1][1]

    reader._start = noted
    for number in range(len(files)):
        reader.read_index(number, 1)
    assert len(taken) == len(files)
    assert all(np.array_equal(sample, data[index]) for index, (sample, _) in taken)


def test_a_file_that_ends_before_a_sample_is_an_error(path):
    reader = reader_of(path)
    with open(path, "r+b") as file:
        file.truncate((SAMPLES - 1) * SAMPLE_BYTES + 7)
    (last,) = [n for n, (_, index) in reader.global_index_map.items() if index == SAMPLES - 1]
    with pytest.raises(TransferError, match="indexed_binary"):
        reader.read_index(last, 1)


def test_an_index_with_fewer_samples_is_an_error(path):
    with pytest.raises(CorruptCheckpointError, match=r"12 samples are indexed.*: 13"):
        reader_of(path, SAMPLES + 1)
