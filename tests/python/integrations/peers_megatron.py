"""Runs Megatron-Core's tests of its checkpoints, by its own means and with `enable`, on the host.

    python tests/python/integrations/peers_megatron.py CHECKOUT [FILE …]

The tests want a GPU for each of eight ranks. Here the ranks are processes that talk by gloo and
keep everything on the host (`without_gpu`), forked from one that has imported Megatron-Core. A test
passes if it does on all ranks. After a test on which ranks disagree, or which does not end in time,
new ranks go on with the next one. The outcome is a table and JSON; the exit code is 1 if a test
passes by Megatron-Core's own means alone, and is not one of those in `EXPLAINED`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch.distributed as dist
from megatron.core import utils
from packaging.version import Version

from penstock_bench.harness.options import free_port
from penstock_bench.workloads.without_gpu import host_for_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STOCK, OURS = "stock", "penstock"
PASSED, FAILED, SKIPPED, STOPPED = "passed", "failed", "skipped", "stopped"
EXPLAINED = {"test_cpu_tensors_dont_take_too_much_space": "it looks for the files of torch_dist"}
"""Tests of what only Megatron-Core's own format promises."""
_FOLDER = "tests/unit_tests/dist_checkpointing"
_DOWNLOAD = "tests.test_utils.python_scripts.download_unit_tests_dataset"
_COLLECTIVE = timedelta(seconds=60)
"""After this long a rank gives up waiting for another one."""
_APART_SECONDS = 15.0
"""So long after the last event, ranks of which some have failed a test are ended."""


class Outcomes:
    """A pytest plug-in that notes the outcome of each test, and skips those that have one.

    Args:
        path: A file of lines, one for a test that begins or ends.
        known: Tests that are not run again.
    """

    def __init__(self, path: Path, known: Iterable[str]) -> None:
        self._file = path.open("a")
        self._known = set(known)

    def _write(self, name: str, outcome: str, reason: str = "") -> None:
        print(json.dumps([name, outcome, reason]), file=self._file, flush=True)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Takes out the tests that are known."""
        items[:] = [one for one in items if one.nodeid not in self._known]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Notes the begin of a test."""
        self._write(nodeid, STOPPED)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the outcome of a test, that of its worst phase last."""
        if report.when == "call" or report.outcome != PASSED:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            lines = str(reason or "").strip().splitlines()
            self._write(report.nodeid, report.outcome, lines[-1] if lines else "")


def prepare(mode: str) -> None:
    """Makes this process a rank without a GPU, which saves in one of the two ways."""
    host_for_cuda()
    changed: Any = dist
    changed.init_process_group = _by_gloo(dist.init_process_group)
    changed.new_group = _by_gloo(dist.new_group)
    # Their fixtures compare the version of Transformer Engine, which need not be installed.
    utils._te_version = utils._te_version or Version("0")
    # Their settings of pytest download data, which tests of checkpoints do not read.
    nothing = cast("Any", ModuleType(_DOWNLOAD))
    nothing.download_and_extract_asset = lambda **_: None
    sys.modules[_DOWNLOAD] = nothing
    if mode == OURS:
        from penstock.integrations.megatron import enable

        enable()


def _by_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def by_gloo(*arguments: Any, **further: Any) -> Any:
        further.pop("pg_options", None)
        if further.get("backend") == "nccl":
            further["backend"] = "gloo"
        return make(*arguments, **{**further, "timeout": _COLLECTIVE})

    return by_gloo


def run_file(file: str, mode: str, ranks: int, timeout_seconds: float) -> dict[str, list[str]]:
    """Runs the tests of a file; returns outcome and reason of each."""
    found: dict[str, list[str]] = {}
    while True:
        with tempfile.TemporaryDirectory(prefix="penstock-peers-") as place:
            _run_ranks(file, mode, ranks, timeout_seconds, Path(place), found)
            each = [_read(Path(place) / str(rank)) for rank in range(ranks)]
        names = list(dict.fromkeys(name for one in each for name in one))
        new = {name: _worst([one.get(name, [STOPPED, ""]) for one in each]) for name in names}
        is_cut = any(len({one.get(name, [STOPPED])[0] for one in each}) > 1 for name in names)
        is_cut |= any(outcome == STOPPED for outcome, _ in new.values())
        found |= new
        if not is_cut or not new:
            return found


def _worst(outcomes: list[list[str]]) -> list[str]:
    order = (STOPPED, FAILED, SKIPPED, PASSED)
    # A rank that waits for one that has failed is stopped: the failure says more.
    failed = [one for one in outcomes if one[0] == FAILED]
    return failed[0] if failed else min(outcomes, key=lambda one: order.index(one[0]))


def _read(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        name, outcome, reason = json.loads(line)
        found[name] = [outcome, reason]
    return found


def _run_ranks(
    file: str, mode: str, ranks: int, timeout_seconds: float, place: Path, known: Iterable[str]
) -> None:
    """Runs pytest on all ranks, until they have ended or one has done nothing for too long."""
    (place / "base").mkdir()
    port, children, latest = free_port(), [], time.time()
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _be_rank(file, mode, rank, ranks, port, place, known)
        children.append(child)
    paths = [place / str(rank) for rank in range(ranks)]
    while children:
        time.sleep(0.5)
        times = [path.stat().st_mtime for path in paths if path.exists()]
        latest = max([latest, *times])
        idle_seconds = time.time() - latest
        is_apart = idle_seconds > _APART_SECONDS and _are_apart([_read(path) for path in paths])
        if is_apart or idle_seconds > timeout_seconds:
            for child in children:
                _end(child)
        ended = [child for child in children if os.waitpid(child, os.WNOHANG)[0]]
        for child in ended:
            # Stock saves leave processes behind.
            _end(child)
        children = [child for child in children if child not in ended]


def _end(rank: int) -> None:
    """Ends the processes of a rank."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(rank, signal.SIGKILL)


def _are_apart(outcomes: list[dict[str, list[str]]]) -> bool:
    """Whether a test has failed on some ranks, and others still run it or have passed it."""
    failed = {name for one in outcomes for name in one if one[name][0] == FAILED}
    return any(one.get(name, [STOPPED])[0] != FAILED for name in failed for one in outcomes)


def _be_rank(
    file: str, mode: str, rank: int, ranks: int, port: int, place: Path, known: Iterable[str]
) -> None:
    """Runs pytest in this process, which is a new one, and ends it."""
    os.setsid()
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
    log = os.open(place / f"log{rank}", os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    try:
        prepare(mode)
        settings = ["-p", "no:cacheprovider", "-o", "addopts=", "-o", "timeout=0", "-q"]
        base = f"--basetemp={place / 'base' / str(rank)}"
        pytest.main([file, *settings, base], plugins=[Outcomes(place / str(rank), known)])
    finally:
        os._exit(0)


def main() -> int:
    """Runs the tests and prints the outcomes."""
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("checkout", type=Path, help="Megatron-LM at the installed version's tag")
    arguments.add_argument("files", nargs="*", help=f"files in {_FOLDER}; all by default")
    arguments.add_argument("--ranks", type=int, default=8)
    arguments.add_argument("--timeout", type=float, default=300, help="seconds for one test")
    arguments.add_argument("--output", type=Path, help="a JSON file for all outcomes")
    given = arguments.parse_args()
    os.chdir(given.checkout)
    sys.path.append(str(given.checkout.resolve()))
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401

    files = given.files or sorted(path.name for path in Path(_FOLDER).rglob("test_*.py"))
    document: dict[str, dict[str, dict[str, list[str]]]] = {}
    is_good = True
    for name in files:
        (path,) = Path(_FOLDER).rglob(name)
        both = {
            mode: run_file(str(path), mode, given.ranks, given.timeout) for mode in (STOCK, OURS)
        }
        document[name] = both
        counts = {mode: dict(Counter(one for one, _ in both[mode].values())) for mode in both}
        sys.stdout.write(f"{name}: stock {counts[STOCK]}, penstock {counts[OURS]}\n")
        if not both[STOCK]:
            is_good = False
            sys.stdout.write("  no test ran by Megatron-Core's own means\n")
        for test, (theirs, _) in both[STOCK].items():
            outcome, reason = both[OURS].get(test, ["missing", "it did not run"])
            if theirs == PASSED and outcome != PASSED:
                short = test.rpartition("::")[2]
                is_good &= short in EXPLAINED
                sys.stdout.write(f"  {short}: {outcome}: {EXPLAINED.get(short, reason)}\n")
        sys.stdout.flush()
        if given.output:
            given.output.write_text(json.dumps(document, indent=1))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
