"""Fixtures of all tests: real disks, a matrix of engines, checkpoints to damage."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

# Set before any import of PyTorch: on some processors MKL's results depend on the alignment of
# memory, and streamed weights are not aligned like those of a model in memory.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

import hypothesis
import pytest

import forks
import older_torch  # noqa: F401  names of newer versions for tests
import penstock
from penstock.errors import StorageError

pytest_plugins = ["buckets", "dispositions", "gpu", "leftovers", "seals", "turns"]

REPOSITORY = Path(__file__).resolve().parents[2]

# No test depends on how fast the machine is.
hypothesis.settings.register_profile("penstock", max_examples=50, deadline=None, print_blob=True)
hypothesis.settings.load_profile("penstock")

for _name in [name for name in os.environ if re.match("PENSTOCK_(?!TORTURE_|RECORD_SEALS)", name)]:
    # The tests must not depend on the user's settings.
    del os.environ[_name]


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Keeps imported modules out of garbage collections.

    PyTorch and frameworks are millions of objects: tests that collect garbage took 0.3 s each time.
    """
    gc.collect()
    gc.freeze()


def slow(*values: Any) -> list[Any]:
    """Marks values of a parameter as slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def supports_direct(directory: Path) -> bool:
    """Whether a real O_DIRECT write works in a directory."""
    path = directory / "probe"
    try:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, 4096) as page:
            return os.write(fd, page) == 4096
    except OSError:
        return False
    finally:
        os.close(fd)
        path.unlink()


@cache
def uring_refusal() -> str | None:
    """Returns why io_uring does not work here; None if it does."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            # Long enough to be stored in a shard: a tree alone needs no engine.
            options = penstock.Options(engine="uring")
            penstock.save(f"{directory}/probe", bytes(1 << 13), options=options)
        except StorageError as error:
            return str(error)
    return None


@cache
def watch_refusal() -> str | None:
    """Returns why lazy saves fall back to eager ones here; None if the kernel can watch memory."""
    import torch

    with tempfile.TemporaryDirectory() as directory:
        store = penstock.CheckpointStore(directory)
        report = store.save_async(1, torch.zeros(1 << 20), lazy=True).result()
    reasons = [text for text in report.fallbacks if "copied at the call" in text]
    return reasons[0] if reasons else None


@pytest.fixture(scope="session")
def need_watch() -> None:
    reason = watch_refusal()
    if reason is not None:
        pytest.skip(f"the kernel does not watch memory: {reason}")


def tell(*values: object) -> None:
    """Prints values for the report of a failed test: seeds, measurements."""
    print(*values)  # noqa: T201


def need_uring() -> None:
    reason = uring_refusal()
    if reason is not None:
        pytest.skip(f"io_uring does not work on this machine: {reason}")


@pytest.fixture
def disk_path(tmp_path):
    """Yields a fresh directory with direct I/O, in the repository if /tmp has none."""
    if supports_direct(tmp_path):
        yield tmp_path
        return
    (REPOSITORY / ".cache").mkdir(exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="tests-", dir=REPOSITORY / ".cache"))
    try:
        if not supports_direct(directory):
            pytest.skip(f"neither {tmp_path} nor {directory} has direct I/O")
        yield directory
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def memory_path(tmp_path):
    """Yields a directory in memory if possible, for many saves whose disk does not matter."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="penstock-test-") as directory:
        yield Path(directory)


MATRIX = [("uring", "on"), ("uring", "off"), ("threads", "on"), ("threads", "off")]


@pytest.fixture(params=MATRIX, ids=["-".join(pair) for pair in MATRIX])
def options(request):
    """Returns options for both engines, with and without direct I/O."""
    engine, direct = request.param
    if engine == "uring":
        need_uring()
    return penstock.Options(engine=engine, direct=direct)


@pytest.fixture
def need_root():
    """Skips the test unless it runs as root."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


@contextmanager
def mounted(kind: str, directory: Path, size_bytes: int):
    """Mounts a small file system; skips the test if mounting is not possible."""
    directory.mkdir()
    if kind in ("tmpfs", "ramfs"):
        command = ["mount", "-t", kind, "-o", f"size={size_bytes}", "penstock-test", directory]
    else:
        image = directory.with_suffix(".img")
        image.touch()
        os.truncate(image, size_bytes)
        run_or_skip([f"mkfs.{kind}", "-q", "-f" if kind == "btrfs" else "-F", image])
        command = ["mount", "-o", "loop", image, directory]
    run_or_skip(command)
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


def run_or_skip(command: list[str | Path]) -> None:
    """Runs a command; skips the test with the command's output if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if done.returncode != 0:
        pytest.skip(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


def run_child(
    script: str, *arguments: object, is_fresh: bool = False, timeout_seconds: int = 200
) -> Any:
    """Runs a script in a process of its own; returns the JSON of its last line of output.

    Args:
        script: Source of the program.
        arguments: Arguments of the program.
        is_fresh: Whether to start a new interpreter in any case. Otherwise a script that mentions
            PyTorch runs in a fork of a process that has imported it.
        timeout_seconds: Time limit of the program.
    """
    command = ["-c", textwrap.dedent(script), *map(str, arguments)]
    if is_fresh or "torch" not in script:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    else:
        done = forks.run(command, timeout=timeout_seconds)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def run_command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``penstock ARGUMENTS`` in this process; returns exit code and output.

    A process of its own takes a fifth of a second to import what commands need. Tests of a
    terminal, of signals and of the start of a program begin one all the same.

    Args:
        arguments: Arguments of the command.
        environment: Variables that only this command has.
    """
    from penstock import cli

    out, errors = io.StringIO(), io.StringIO()
    command = ["penstock", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return subprocess.CompletedProcess(command, ended.value.code, out.getvalue(), errors.getvalue())


@pytest.fixture(scope="session")
def jobs():
    """Yields jobs whose ranks serve all tests, so leftovers of one save meet the next one."""
    # Only some tests need PyTorch and its processes.
    from ranks import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def lone_job():
    """Makes this process a job of one rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
