"""DLIO's whole program under MPI, with Penstock's mechanism and readers: its results, its exit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("dlio_benchmark", reason="DLIO has its own environment: scripts/dlio test")

from dlio_programs import IS_RELEASE, MPIRUN, RUN_SECONDS_MAX, TINY, places, run

import penstock
from penstock_bench.suites.dlio.program import Program, ProgramError, Shape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(IS_RELEASE, reason="the program of DLIO 2.0.0 imports TensorFlow"),
]

READS_ONLY = (
    "++workload.checkpoint.num_checkpoints_write=0",
    "++workload.checkpoint.num_checkpoints_read=1",
)
READERS = {
    "npy": "NPYReader",
    "npz": "NPZReader",
    "indexed_binary": "IndexedBinaryReader",
}


def test_a_run_saves_loads_and_reports(disk_path):
    done = run(disk_path, 2, *TINY)
    assert done.returncode == 0, done.stderr
    summary = json.loads((disk_path / "out" / "summary.json").read_text())
    assert summary["metric"]["save_checkpoint_io_mean_GB_per_second"] > 0
    assert summary["metric"]["load_checkpoint_io_mean_GB_per_second"] > 0
    path = disk_path / "checkpoints" / "global_epoch1_step1"
    assert penstock.verify(path).ok
    next(path.glob("shard-00001-*")).unlink()
    done = run(disk_path, 2, *TINY, *READS_ONLY)
    assert done.returncode not in (0, None)
    assert "shard-00001" in done.stdout + done.stderr
    assert "CorruptCheckpointError" in done.stdout + done.stderr


def test_another_number_of_ranks_ends_the_run_with_an_error(disk_path):
    assert run(disk_path, 2, *TINY).returncode == 0
    done = run(disk_path, 1, *TINY, *READS_ONLY)
    assert done.returncode not in (0, None)
    assert "mpirun -np 2" in done.stdout + done.stderr


def signal_all(processes, number):
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


def kill_amid_a_save(directory, is_amid):
    """Starts a run that saves, and kills all of it where it is amid a save.

    It is asked often, and once more when all ranks stand still: they run on if it was too late.
    """
    many = "++workload.checkpoint.num_checkpoints_write=400"
    command = [
        *(str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-np", "2"),
        *(sys.executable, "-m", "mpi4py", "-m", "dlio_benchmark.main", *TINY, many),
        *(*places(directory), f"hydra.run.dir={directory / 'hydra'}"),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    # MPI starts each rank in a process group of its own.
    every = [psutil.Process(process.pid)]
    try:
        while process.poll() is None:
            if not is_amid():
                continue
            every = [*every[:1], *every[0].children(recursive=True)]
            signal_all(every, signal.SIGSTOP)
            if is_amid():
                break
            signal_all(every, signal.SIGCONT)
    finally:
        signal_all(every, signal.SIGKILL)
        psutil.wait_procs(every[1:])
    assert process.wait() == -signal.SIGKILL


def load(directory, count):
    reads = f"++workload.checkpoint.num_checkpoints_read={count}"
    return run(directory, 2, *TINY, *READS_ONLY, reads)


def test_a_run_killed_amid_a_save_is_resumed_from_whole_checkpoints(disk_path):
    checkpoints = disk_path / "checkpoints"

    def torn():
        """The newest checkpoint, if its files are there and it is not committed."""
        found = len(list(checkpoints.glob("global_epoch1_step*")))
        path = checkpoints / f"global_epoch1_step{found}"
        is_torn = any(path.glob("shard-*")) and not (path / "manifest.json").exists()
        return path if is_torn and found > 1 else None

    kill_amid_a_save(disk_path, torn)
    path = torn()
    whole = [one for one in checkpoints.iterdir() if one != path]
    assert all(penstock.verify(one).ok for one in whole)
    done = load(disk_path, len(whole))
    assert done.returncode == 0, done.stderr
    done = load(disk_path, len(whole) + 1)
    assert done.returncode not in (0, None)
    assert "IncompleteCheckpointError" in done.stdout + done.stderr
    assert path.name in done.stdout + done.stderr
    count = f"++workload.checkpoint.num_checkpoints_write={len(whole) + 1}"
    done = run(disk_path, 2, *TINY, count)
    assert done.returncode == 0, done.stderr
    assert all(penstock.verify(one).ok for one in (*whole, path))


def test_a_run_killed_while_it_replaces_a_checkpoint_leaves_the_one_before(disk_path):
    count = "++workload.checkpoint.num_checkpoints_write=20"
    done = run(disk_path, 2, *TINY, count)
    assert done.returncode == 0, done.stderr
    paths = list((disk_path / "checkpoints").iterdir())
    before = {
        path: (set(path.glob("shard-*")), (path / "manifest.json").read_bytes()) for path in paths
    }

    def replaced():
        """A checkpoint with files of another one, which is not committed."""
        for path, (shards, manifest) in before.items():
            has_more = bool(set(path.glob("shard-*")) - shards)
            if has_more and (path / "manifest.json").read_bytes() == manifest:
                return path
        return None

    kill_amid_a_save(disk_path, replaced)
    assert replaced()
    assert all(penstock.verify(one).ok for one in paths)
    done = load(disk_path, len(paths))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", READERS)
def test_samples_are_generated_by_dlio_and_read_by_ours(disk_path, kind):
    # DLIO leaves files out until their number is a multiple of the samples in a file and a batch.
    files, samples = (8, 4) if kind == "indexed_binary" else (4, 1)
    settings = (
        "workload=unet3d_a100",
        f"++workload.dataset.data_folder={disk_path / 'data'}",
        f"++workload.dataset.format={kind}",
        f"++workload.dataset.num_files_train={files}",
        f"++workload.dataset.num_samples_per_file={samples}",
        "++workload.dataset.record_length_bytes=65536",
        "++workload.dataset.record_length_bytes_stdev=0",
        "++workload.dataset.record_length_bytes_resize=4096",
        "++workload.reader.batch_size=2",
        "++workload.reader.read_threads=1",
        f"++workload.reader.reader_classname=penstock.integrations.dlio.{READERS[kind]}",
        "++workload.train.epochs=1",
        "++workload.train.computation_time=0",
        "++workload.workflow.generate_data=True",
        "++workload.workflow.checkpoint=False",
    )
    done = run(disk_path, 1, *settings)
    assert done.returncode == 0, done.stderr
    assert f"Ending epoch 1 - {files * samples // 2} steps completed" in done.stdout + done.stderr
    newest = max((disk_path / "data" / "train").glob(f"*.{kind}"))
    os.truncate(newest, 100)
    done = run(disk_path, 1, *settings, "++workload.workflow.generate_data=False")
    assert done.returncode not in (0, None)
    assert newest.name in done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("strace") is None, reason="counts system calls with strace")
def test_dlios_own_key_syncs_nothing_and_each_of_ours_is_durable(disk_path):
    shape = Shape(ranks=2, layers=1, vocabulary=500, hidden=128, ffn=256)

    def syncs(mechanism):
        python = Path(sys.executable)
        program = Program(python, mechanism, shape, disk_path / "run", RUN_SECONDS_MAX)
        try:
            return program.syncs()
        finally:
            program.clear()

    try:
        # Two ranks write a file each for the model and the optimizer.
        assert syncs("") == 0
        assert syncs("penstock_bench.suites.dlio.synced.SyncedTorchSave") == 4
        # A shard and a part of each rank, the manifest, and directories.
        assert syncs("penstock.integrations.dlio.Checkpointing") >= 6
    except ProgramError as error:
        if "ptrace" in str(error):
            pytest.skip("strace may not trace here")
        raise
