"""`penstock bench checkpoint`: what it measures and proves, what it refuses, what it leaves."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import forks
from conftest import mounted, supports_direct
from penstock.cli import cli
from penstock_bench.cli.checkpoint_table import print_results
from penstock_bench.harness import running
from penstock_bench.harness.running import BenchError
from penstock_bench.peers.checkpoint import SEALED, WRITERS, libraries, with_sealed
from penstock_bench.peers.checkpoint.emulated import FastPersist
from penstock_bench.results.compare import compare
from penstock_bench.results.results import Results
from penstock_bench.suites.checkpoint import spawning
from penstock_bench.suites.checkpoint import team as team_module
from penstock_bench.suites.checkpoint.checkpoint import Rank
from penstock_bench.suites.checkpoint.operations import (
    Outcome,
    WriterError,
    load,
    save,
    summed_up,
    together,
)
from penstock_bench.suites.checkpoint.plan import Plan
from penstock_bench.suites.checkpoint.team import LaunchError, Team, launched, store_at
from penstock_bench.workloads import content, scaling
from penstock_bench.workloads.content import TensorSpec, rank_state
from penstock_bench.workloads.models import MODELS, Model
from ranks import Job, free_port

INSTALLED = [name for name, entry in WRITERS.items() if entry.missing is None]
TINY = Model(vocabulary=96, hidden=64, ffn=128, layers=2, heads=2, kv_heads=1)
COMMAND = ["-m", "penstock", "bench", "checkpoint"]
PATIENCE_SECONDS = 240
"""The limit of a command that takes a second: it finds a hang before the test times out."""


def refused(*arguments):
    """The words that refuse a command that makes no sense."""
    told = CliRunner().invoke(cli, ["bench", "checkpoint", *map(str, arguments)])
    assert told.exit_code == 2, told.output
    return " ".join(told.output.split())


@pytest.fixture
def forked_ranks(monkeypatch):
    """Ranks that this process starts need not import PyTorch."""
    monkeypatch.setattr(spawning, "subprocess", forks.replacing(forks.InterpreterPopen))


def measured(directory, *arguments):
    command = ["bench", "checkpoint", directory, "--json", *arguments]
    done = CliRunner().invoke(cli, list(map(str, command)))
    assert done.exit_code == 0, done.output
    assert list(directory.iterdir()) == []
    return Results.read(_written(directory, done.stdout)), json.loads(done.stdout)


def _written(directory, text):
    path = directory.with_name("results.json")
    path.write_text(text)
    return path


def plan(directory, writers, **changes):
    directory.mkdir(exist_ok=True)
    return Plan(
        directory=str(directory), model=TINY, ranks=[0], label="tiny", writers=writers, **changes
    )


def test_writers_that_can_encrypt_are_measured_sealed_as_well():
    assert with_sealed(["penstock", "torch.save"]) == ["penstock", "torch.save", "penstock-sealed"]
    twice = with_sealed(["penstock-sealed", "penstock-async", "penstock"])
    assert twice == ["penstock-sealed", "penstock-async", "penstock", "penstock-async-sealed"]
    assert all(name.removesuffix(SEALED) in WRITERS for name in WRITERS)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_every_writer_saves_and_loads_on_two_ranks_and_proves_its_path(
    disk_path, capsys, monkeypatch
):
    place = disk_path / "place"
    place.mkdir()
    options = ["--model", "llama3-405b-tp4-pp2", "--scale", "1e-5", "--processes", 2]
    found, document = measured(
        place, *options, "--writer", ",".join(INSTALLED), "--rounds", 2, "--verify"
    )
    assert [one.error for one in found.measurements] == [None] * (4 * len(INSTALLED))
    scale = found.settings["scale"]
    assert found.settings["ranks"] == [0, 4]
    assert scale["factor"] == pytest.approx(scale["bytes"] / scale["full_bytes"])
    saves, loads = found.cases
    model = Model(**found.settings["model"])
    tensors = sum(len(rank_state(model, rank).tensors) for rank in (0, 4))
    for by in INSTALLED:
        saved, loaded = found.of(saves, by), found.of(loads, by)
        assert {one.nbytes for one in saved + loaded} == {scale["bytes"]}
        # A file that no rank calls its own, or one that is in memory, would be noted.
        assert [note for one in saved + loaded for note in one.notes] == []
        assert {one.checked for one in loaded} == {tensors}
        assert {len(one.rate_spread) for one in saved + loaded} == {2}
        is_direct = by.startswith("penstock") or by == "fastpersist"
        for one in saved:
            assert one.is_direct == is_direct
            # Parts and the manifest of a direct save are buffered.
            assert (one.resident_fraction > 0.9) == (not is_direct)
            assert one.metadata["sync"] > one.metadata["create"] >= 2
            assert one.synced_by.startswith("benchmark") == (
                not by.startswith("penstock") and by != "dcp"
            )
            assert (one.stall_seconds is not None) == by.startswith("penstock-async")
        assert {one.resident_fraction for one in loaded} == {0.0}
    summary = {(one["case"], one["by"]): one for one in document["summary"]}
    one, other = found.of(saves, "torch.save")
    told = summary[saves, "torch.save"]
    rates = [one.durable_gb_per_second, other.durable_gb_per_second]
    # Of two the median is their mean; of all it is what terminal and page show.
    assert told["gb_per_second"] == pytest.approx(sum(rates) / 2)
    assert told["mlperf_mean_gb_per_second"] == pytest.approx(sum(rates) / 2)
    assert found.settings["emulated"] == ["datastates", "fastpersist"]
    monkeypatch.setenv("COLUMNS", "80")
    print_results(found)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("penstock saves at ")
    assert "too few rounds" in " ".join(lines)
    monkeypatch.setenv("COLUMNS", "120")
    print_results(found)
    lines = capsys.readouterr().out.splitlines()
    firsts = [line.split(" ")[0] for line in lines[lines.index("") :]]
    # Twice each, in a line of its own: how fast, and which way; and what sealing costs.
    expected = {by: 2 + (by + SEALED in INSTALLED) for by in INSTALLED}
    assert {by: firsts.count(by) for by in INSTALLED} == expected


@pytest.mark.parametrize("name", INSTALLED)
def test_a_tensor_with_other_bytes_is_found(disk_path, name):
    writer, held = WRITERS[name].make(), rank_state(TINY, 0).held()
    directory = disk_path / "store" / "step-0000000001"
    save(Team(), writer, directory, held, syncs=True)
    load(Team(), writer, directory, held, verifies=True)
    other = dataclasses.replace(held, first_index=1, kept=None).held()
    with pytest.raises(WriterError, match="other bytes"):
        load(Team(), writer, directory, other, verifies=True)
    writer.close()


def test_pieces_of_a_tensor_that_change_places_are_found(monkeypatch):
    monkeypatch.setattr(content, "_PATTERN_BYTES", 1 << 16)
    monkeypatch.setattr(content, "_pattern", None)
    spec = TensorSpec(("large",), (1 << 18,), torch.uint8)
    tensor = content.filled(spec, 3)
    assert content.difference(spec, 3, tensor) is None
    pieces = tensor.view(4, -1)
    pieces[[1, 2]] = pieces[[2, 1]]
    assert "other bytes" in content.difference(spec, 3, tensor)


def test_rates_of_ranks_are_their_own():
    """The names that the first one syncs when all are done belong to the whole."""
    outcomes = [
        Outcome(
            nbytes=10**9, seconds=1.0, durable_seconds=seconds, cpu_seconds=0.0, files=1,
            named_seconds=named,
        )
        for seconds, named in ((1.0, 5.0), (4.0, 0.0))
    ]  # fmt: skip
    settings = {"case": "save", "by": "torch.save", "number": 0, "syncs": True}
    made = summed_up(outcomes, WRITERS["torch.save"].make(), **settings)
    assert made.rate_spread == [1.0, 0.25]
    assert made.seconds + made.sync_seconds == 5.0


def test_fastpersist_fills_its_buffers_in_turn(disk_path, monkeypatch):
    monkeypatch.setattr(FastPersist, "buffer_bytes", 3 * 8192)
    monkeypatch.setattr(FastPersist, "request_bytes", 8192)
    writer, held = FastPersist(), rank_state(TINY, 0).held()
    directory = disk_path / "step-1"
    (outcome,) = save(Team(), writer, directory, held, syncs=True)
    assert outcome.detail["direct_io"] == supports_direct(disk_path)
    assert outcome.detail["requests"] == -(-held.nbytes // 8192)
    assert writer.path(directory).stat().st_size == held.nbytes
    load(Team(), writer, directory, held, verifies=True)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="counts system calls with strace")
def test_syncs_are_counted_as_they_are_made(disk_path):
    script = """
    import sys
    from pathlib import Path
    from penstock_bench.workloads.content import rank_state
    from penstock_bench.workloads.models import Model
    from penstock_bench.suites.checkpoint.operations import save
    from penstock_bench.suites.checkpoint.team import Team
    from penstock_bench.peers.checkpoint import WRITERS
    held = rank_state(Model(**eval(sys.argv[2])), 0).held()
    count = 0
    for number, name in enumerate(("penstock", "penstock-async", "dcp")):
        directory = Path(sys.argv[1], str(number), "step-0000000001")
        writer = WRITERS[name].make()
        count += save(Team(), writer, directory, held, syncs=True)[0].syncs
        writer.close()
    print(count)
    """
    log = disk_path / "calls"
    command = ["strace", "-f", "-e", "trace=fsync,fdatasync", "-o", str(log), sys.executable, "-c"]
    text = re.sub("^    ", "", script, flags=re.M)
    done = subprocess.run(
        [*command, text, str(disk_path), str(dataclasses.asdict(TINY))],
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"f(?:data)?sync\(", log.read_text())) == int(done.stdout)


@pytest.mark.slow
def test_without_fsync_nothing_is_added(disk_path):
    told = []
    Rank(
        plan(disk_path / "work", ["penstock", "torch.save"], syncs=False), Team(), told.append
    ).run()
    found = {one.by: one for one in told if not isinstance(one, str) and "save," in one.case}
    assert found["torch.save"].metadata["sync"] == 0
    assert found["torch.save"].synced_by == "nobody"
    assert found["penstock"].metadata["sync"] > 0
    assert found["penstock"].synced_by == "writer"


@pytest.mark.slow
def test_memory_is_called_neither_direct_nor_cold(disk_path, need_root):
    told = []
    with mounted("tmpfs", disk_path / "memory", 64 << 20) as memory:
        Rank(plan(memory / "work", ["penstock", "fastpersist"]), Team(), told.append).run()
    found = [one for one in told if not isinstance(one, str)]
    assert [one.error for one in found] == [None] * 4
    assert not any(one.is_direct for one in found)
    assert all(one.notes for one in found if one.by == "fastpersist" or "load" in one.case)


def test_a_writer_that_fails_is_told_and_not_tried_again(disk_path, monkeypatch):
    class Full(libraries.TorchSave):
        """Has no room for the second state."""

        def save(self, directory, state):
            if directory.name > "step-0000000002":
                raise OSError(28, "No space left on device", str(directory))
            super().save(directory, state)

    monkeypatch.setattr(libraries, "TorchSave", Full)
    told = []
    work = disk_path / "work"
    Rank(plan(work, ["penstock", "torch.save"], rounds=2), Team(), told.append).run()
    found = [one for one in told if not isinstance(one, str)]
    errors = [one for one in found if one.error]
    assert [one.by for one in errors] == ["torch.save"]
    assert "No space left" in errors[0].error
    assert len([one for one in found if one.by == "penstock"]) == 4
    assert [path for path in work.rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_passes_fill_a_quota_each_time(disk_path):
    told = []
    nbytes = rank_state(TINY, 0).nbytes
    filling = {"fill": 0.9, "fill_bytes": 4 * nbytes, "passes": 2}
    work = plan(disk_path / "work", ["penstock", "torch.save"], **filling)
    Rank(work, Team(), told.append).run()
    found = [one for one in told if not isinstance(one, str)]
    counts = [
        len([one for one in found if (one.case, one.by, one.error) == (case, by, None)])
        for case in work.cases
        for by in work.writers
    ]
    assert counts == [3] * 4
    assert [path for path in Path(work.directory).rglob("*") if path.is_file()] == []


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_missing_library_is_a_line_and_the_others_are_measured(disk_path, monkeypatch):
    gone = dataclasses.replace(WRITERS["torchsnapshot"], package="no_such_package")
    monkeypatch.setitem(WRITERS, "torchsnapshot", gone)
    filling = ["--model", "gpt2", "--fill", "0.9", "--fill-size", "16M", "--passes", "2"]
    told = CliRunner(env={"COLUMNS": "80"}).invoke(
        cli,
        ["bench", "checkpoint", str(disk_path), *filling, "--writer", "torchsnapshot,datastates"],
    )
    assert told.exit_code == 0, told.output
    assert "pip install no_such_package" in " ".join(told.stderr.split())
    # As many in one pass as in the other.
    assert re.search(r" ([4-9]) \+ \1 ", told.stdout)
    assert "datastates (emulated)" in told.stdout
    assert "torchsnapshot" not in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert list(disk_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt9"], "llama3-405b-tp4-pp2"),
        (["--writer", "penstock,pickle"], "fastpersist: emulated FastPersist"),
        (["--scale", "2"], "neither auto nor a number"),
        (["--tp", "3"], "does not divide"),
        (["--pp", "99"], "32 blocks"),
        (["--model", "gpt2", "--processes", "2"], "only 1 ranks write"),
        (["--passes", "2"], "go with --fill"),
        (["--fill", "0.5", "--rounds", "2"], "--fill has none"),
        (["--model", "gpt2", "--scale", "0.1", "--fill", "0.5", "--fill-size", "64M"], "67 GB"),
        (["--fill", "0.5", "--fill-size", "900T"], "GB free and filling 50%"),
        (["--model", "1t", "--zero", "0", "--tp", "1", "--pp", "1", "--scale", "1"], "GB free"),
    ],
)
def test_what_makes_no_sense_or_has_no_room_is_refused_before_anything_is_written(
    disk_path, arguments, message
):
    assert message in refused(disk_path, *arguments)
    assert list(disk_path.iterdir()) == []


def test_a_directory_that_is_none_is_refused(disk_path):
    assert "is no directory" in refused(disk_path / "nowhere")


def started(directory, *more, **options):
    """A run that would last for long, once its ranks are saving; and its processes."""
    arguments = ["--model", "llama3-8b", "--scale", "1e-4", "--processes", "2", "--rounds", "9999"]
    command = [*COMMAND, directory, *arguments, *more]
    child = forks.Popen(command, start_new_session=True, **options)
    deadline = time.monotonic() + PATIENCE_SECONDS
    # Beyond the toy states of both writers, and the first round of one.
    while not list(directory.glob(".penstock-bench-*/*/step-0000000004/*")):
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.01)
    ranks = psutil.Process(child.pid).children(recursive=True)
    assert len(ranks) == 2
    return child, ranks


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_when_it_is_ended_no_file_and_no_process_is_left_and_results_are_written(disk_path, ending):
    place, written = disk_path / "place", disk_path / "results.json"
    place.mkdir()
    child, ranks = started(place, "--output", written)
    os.killpg(child.pid, ending)
    assert child.wait(PATIENCE_SECONDS) == 130
    assert list(place.iterdir()) == []
    assert psutil.wait_procs(ranks, timeout=PATIENCE_SECONDS)[1] == []
    assert len(Results.read(written).measurements) >= 2


@pytest.mark.slow
def test_a_rank_that_dies_ends_all(disk_path):
    child, ranks = started(disk_path, stderr=subprocess.PIPE, text=True)
    ranks[1].kill()
    _, told = child.communicate(timeout=PATIENCE_SECONDS)
    assert child.returncode == 1
    assert "rank 1 was ended by SIGKILL" in " ".join(told.split())
    assert list(disk_path.iterdir()) == []
    assert psutil.wait_procs(ranks, timeout=PATIENCE_SECONDS)[1] == []


def told_of_ranks(directory, *programs):
    """The errors of ranks that run such programs instead."""
    logs = [directory / f"log-{rank}" for rank in range(len(programs))]
    children = []
    for rank, (program, log) in enumerate(zip(programs, logs, strict=True)):
        with log.open("w") as file:
            stdout = file if rank else subprocess.PIPE
            command = [sys.executable, "-c", program]
            children.append(subprocess.Popen(command, stdout=stdout, stderr=file, text=True))
    try:
        with pytest.raises(BenchError) as told:
            list(spawning._messages(children, logs))
    finally:
        for child in children:
            child.kill()
            child.communicate()
    return str(told.value)


FAILS = "raise MemoryError('no room for the state')"
FOLLOWS = "import os, time; time.sleep(0.7); os.abort()"


def test_of_ranks_that_die_the_first_one_is_told_of(disk_path):
    assert "rank 0 ended with code 1" in told_of_ranks(disk_path, FAILS)
    told = told_of_ranks(disk_path, FOLLOWS, FAILS)
    assert told.startswith("rank 1 ended with code 1:")
    assert told.endswith("MemoryError: no room for the state")
    assert "rank 0 was ended by SIGKILL; is there too little memory?" in told_of_ranks(
        disk_path, "import os; os.kill(os.getpid(), 9)", "import time; time.sleep(60)"
    )


def test_what_lies_in_the_users_directory_is_no_library(disk_path):
    place, here = disk_path / "place", disk_path / "here"
    place.mkdir()
    here.mkdir()
    (here / "numpy.py").write_text("raise RuntimeError('a file of the user')\n")
    options = ["--size", "1M", "--pattern", "write", "--rounds", "1"]
    # As the installed command: its own directory is no place of libraries either.
    command = [sys.executable, "-P", "-m", "penstock", "bench", "io", place, *options]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_directory_of_somebody_else_is_left_alone(disk_path, monkeypatch):
    other = disk_path / ".penstock-bench-theirs"
    other.mkdir()
    (other / "of another run").touch()
    monkeypatch.setattr(running.secrets, "token_hex", lambda _: "theirs")
    told = CliRunner().invoke(
        cli, ["bench", "checkpoint", str(disk_path), "--model", "gpt2", "--scale", "1e-3"]
    )
    assert told.exit_code == 1
    assert isinstance(told.exception, FileExistsError)
    assert [path.name for path in other.iterdir()] == ["of another run"]


def test_what_is_staged_counts_as_memory(disk_path, monkeypatch):
    free = 5 * rank_state(MODELS["gpt2"], 0).nbytes // 2
    room = collections.namedtuple("Usage", "total used free")(1 << 50, 0, 1 << 50)
    monkeypatch.setattr(scaling, "memory_bytes", lambda: free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    told = refused(
        disk_path, "--model", "gpt2", "--scale", "1", "--writer", "torch.save,penstock-async"
    )
    assert "3 times with what penstock-async stage" in told


def fail_on_one_rank(port):
    """One rank fails where the other one waits for it; then both do something together."""
    team_module._WRITERS_TIMEOUT = timedelta(seconds=3)
    rank = dist.get_rank()
    dist.destroy_process_group()
    team = Team(rank, 2)
    team.join(store_at("127.0.0.1", port, rank, 2))

    def act():
        if rank:
            raise OSError(28, "No space left on device")
        dist.barrier()

    said = []
    for _ in range(2):
        try:
            together(team, act)
        except WriterError as error:
            said.append(str(error))
        team.renew()
    shared = [None, None]
    # As a writer does, in the group of all.
    dist.all_gather_object(shared, said)
    return shared


@pytest.mark.slow
def test_a_writer_that_fails_on_one_rank_holds_nobody_up_and_harms_no_other():
    job = Job(2)
    try:
        for shared in job.call(fail_on_one_rank, free_port(), timeout_seconds=PATIENCE_SECONDS):
            assert shared[0] == shared[1]
            assert all("rank 0: " in one or "rank 1: OSError" in one for one in shared[0])
            assert len(shared[0]) == 2
    finally:
        job.close()


def by_torchrun(*arguments):
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return forks.run([*launcher, *COMMAND, *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_of_launched_ranks_one_refuses_and_all_end(disk_path):
    done = by_torchrun(disk_path, "--model", "1t", "--zero", "0", "--scale", "1")
    assert done.returncode
    assert len(re.findall("choose a smaller --scale", " ".join(done.stderr.split()))) == 1
    assert list(disk_path.iterdir()) == []


@pytest.mark.slow
def test_torchrun_starts_the_ranks(disk_path):
    place = disk_path / "place"
    place.mkdir()
    arguments = ["--model", "llama3-8b", "--scale", "1e-4", "--rounds", "1", "--verify"]
    done = by_torchrun(place, *arguments, "--writer", "penstock", "--json")
    assert done.returncode == 0, done.stderr
    # One object: the other rank is silent.
    found = json.loads(done.stdout)
    assert found["settings"]["is_launched"]
    assert [len(one["rate_spread"]) for one in found["measurements"]] == [2, 2]
    assert [one["error"] for one in found["measurements"]] == [None, None]
    assert list(place.iterdir()) == []


def test_launchers_are_understood():
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
    here = launched({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert (here.rank, here.ranks, here.address, here.port) == (1, 4, "127.0.0.1", 29500)
    there = {"MASTER_ADDR": "node-1", "MASTER_PORT": "4000"}
    assert launched({**mpi, **there}).address == "node-1"
    slurm = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}
    assert launched({**slurm, **there}).ranks_here == 4
    assert launched({}) is None
    # A job of one task, as on a login node: nothing to meet.
    assert launched({"RANK": "0", "WORLD_SIZE": "1"}) is None
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        launched({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    with pytest.raises(LaunchError, match="MASTER_PORT='here' is no number"):
        launched({**mpi, **there, "MASTER_PORT": "here"})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", [64 << 20, 4 << 30, 1 << 38])
def test_a_model_is_cut_to_what_fits_and_keeps_its_layout(name, target):
    model = MODELS[name]
    ranks = scaling.taking_part(model, 1)
    cut = scaling.scaled(model, ranks, target)
    whole = scaling.rank_bytes(model, ranks)
    assert cut.nbytes == scaling.rank_bytes(cut.model, ranks) <= target
    assert cut.nbytes > 0.4 * min(target, whole)
    assert (cut.model.tp, cut.model.pp, cut.model.dp) == (model.tp, model.pp, model.dp)
    assert cut.model.layers >= model.pp
    assert cut.factor == pytest.approx(cut.nbytes / whole)
    if whole <= target:
        assert cut.model == model
    elif cut.model.hidden == model.hidden:
        assert (cut.model.ffn, cut.model.heads) == (model.ffn, model.heads)
        assert "real sizes" in cut.how
    else:
        assert f"width {cut.model.hidden:,} of {model.hidden:,}" in cut.how
        # Blocks go first: at the full width not even one a stage fits.
        least = dataclasses.replace(model, layers=model.pp, vocabulary=model.tp)
        assert scaling.rank_bytes(least, ranks) > target


def test_ranks_that_take_part_are_from_all_over_the_layout():
    assert scaling.taking_part(MODELS["llama3-405b-tp4-pp2"], 4) == [0, 2, 4, 6]
    # Without ZeRO replicas write nothing.
    copied = dataclasses.replace(TINY, tp=2, dp=4)
    assert scaling.taking_part(copied, 2) == [0, 1]
    with pytest.raises(ValueError, match="only 2 ranks write"):
        scaling.taking_part(copied, 3)


@pytest.mark.slow
def test_runs_of_checkpoints_are_compared_by_case_and_way(disk_path):
    told = []
    work = plan(disk_path / "work", ["penstock-async", "torch.save"], rounds=5)
    Rank(work, Team(), told.append).run()
    run = Results(kind="checkpoint", machine={}, disk={}, settings={})
    run.cases = work.cases
    run.measurements = [one for one in told if not isinstance(one, str)]
    slowed = Results.read(_written(Path(work.directory), json.dumps(run.as_json())))
    for one in slowed.measurements:
        one.seconds, one.sync_seconds = 1000 * one.seconds, 1000 * one.sync_seconds
    found = compare(run, slowed)
    assert {(one.case, one.verdict) for one in found} == {
        ("save, tiny, penstock-async", "slower"),
        ("load, tiny, penstock-async", "slower"),
    }


def test_ranks_hold_other_bytes_under_the_same_names():
    one, other = (rank_state(dataclasses.replace(TINY, tp=2), rank).flat() for rank in (0, 1))
    common = [name for name in one if name in other and one[name].ndim]
    assert common
    for name in common:
        assert not torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8))
