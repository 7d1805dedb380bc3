"""The command behind `make bench-objects`."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from penstock.common.machine.quiesce import settle
from penstock_bench.harness import machine, memory, process, progress
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.options import (
    QUICK_ROUNDS,
    ROOT,
    ROUNDS,
    common,
    names_option,
    output_directory,
    show,
)
from penstock_bench.harness.running import rotated
from penstock_bench.suites.objects import layout, report, server, worker
from penstock_bench.suites.objects.contenders import (
    CONNECTOR,
    CONTENDERS,
    LOAD,
    PENSTOCK,
    PRELOADED,
    SAVE,
    STREAMER,
    Setting,
)
from penstock_bench.suites.objects.proxy import Limits, Proxy
from penstock_bench.suites.objects.results import (
    DISK,
    LARGE,
    MEMORY,
    MIRRORED,
    PACED,
    PARTIAL,
    PLACES,
    PROXIED,
    SMALL,
    STORES,
    Results,
    Sample,
)
from penstock_bench.suites.objects.server import Server
from penstock_bench.suites.objects.worker import StoreTask, Task

_MIB = 1 << 20
_SIZE_MIB, _QUICK_SIZE_MIB = 1024, 64
_LARGE_TIMES_SIZE = 3
# The server has parts of an upload and the object made of them at the same time.
_SERVER_TIMES_STATE = 2.2

# One of each of two stores, and what one of them replaces.
_STORES_TIMES_STATE = 4
_STORE_SAVES = 3

# A third of the tensors, in runs of four: those of a layer, say.
_RUN_TENSORS, _RUN_EVERY = 4, 12

_SWEEP_RUNS = 2
_SETTLE_SECONDS_MAX = 5.0

_COMPLETING = "CompleteMultipartUpload"

_MODEL = "model"
"""Where the file is that is only loaded."""

# Nobody's first import is in a process that is timed; who is not installed is passed over.
process.preload("penstock_bench.suites.objects.worker", *PRELOADED)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@names_option("--only", "names", tuple(CONTENDERS), "Who saves and loads, separated by commas")
@names_option("--places", "places", (*PLACES, MIRRORED), "Where, separated by commas")
@common
@click.option("--size-mib", type=click.IntRange(min=16), help="MiB of the state. [1024]")
@click.option(
    "--memory-directory",
    type=click.Path(path_type=Path, exists=True),
    default=Path("/dev/shm"),
    show_default=True,
    help="Where the server in memory has its objects.",
)
@click.option(
    "--limits",
    "limits_in_all",
    default="200,400",
    show_default=True,
    help="MB/s up and down of all connections through the paced proxy.",
)
@click.option(
    "--shared", is_flag=True, help="All processors for servers and clients, not half for each."
)
@click.option("--sweep/--no-sweep", default=None, help="Find the best settings. [not with --quick]")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for one process.")
def main(
    names: tuple[str, ...],
    places: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    directory: Path,
    output: Path | None,
    size_mib: int | None,
    memory_directory: Path,
    limits_in_all: str,
    shared: bool,
    sweep: bool | None,
    timeout: float,
) -> None:
    """Save checkpoints to buckets of a server on this machine, and load them."""
    size_bytes = (size_mib or (_QUICK_SIZE_MIB if quick else _SIZE_MIB)) * _MIB
    spec = worker.describe(size_bytes)
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    up, down = map(float, limits_in_all.split(","))
    limits = Limits(up=20, down=90, up_in_all=up, down_in_all=down, latency_seconds=0.03)
    client_cores, server_cores = _halves(sorted(os.sched_getaffinity(0)), shared)
    results = Results(
        machine=machine.describe(ROOT),
        disk=machine.disk(directory),
        settings={
            "command": sys.argv[1:],
            "rounds": rounds or (QUICK_ROUNDS if quick else ROUNDS),
            "size_bytes": spec.nbytes,
            "tensors": len(spec.tensors),
            "client_cores": client_cores,
            "server_cores": server_cores,
            "server": " ".join(
                [server.program().parent.name, *server.FLAGS, *server.STORAGE_FLAGS]
            ),
            "limits": asdict(limits),
            "versions": {
                one.package: machine.package_version(one.package) for one in CONTENDERS.values()
            },
        },
    )
    largest = size_bytes * (_LARGE_TIMES_SIZE if LARGE in places else 1)
    with ExitStack() as stack:
        work = {
            MEMORY: stack.enter_context(
                workplace(memory_directory, _SERVER_TIMES_STATE * largest + size_bytes)
            ),
            DISK: stack.enter_context(
                workplace(
                    directory,
                    _SERVER_TIMES_STATE * size_bytes * (DISK in places)
                    + _STORES_TIMES_STATE * size_bytes * (MIRRORED in places),
                )
            ),
        }
        runner = _Runner(results, names, places, work[DISK], timeout)
        runner.run(work, limits, size_bytes, is_swept=not quick if sweep is None else sweep)
    where = output_directory(output)
    results.write(where / "objects.json")
    show(report.render(results), where, "objects")


def _halves(cores: list[int], is_shared: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Processors for clients, and others for servers, so that neither takes the other's."""
    half = len(cores) // 2
    if is_shared or not half:
        return tuple(cores), tuple(cores)
    return tuple(cores[:half]), tuple(cores[half:])


@dataclass(frozen=True)
class _Site:
    """Where checkpoints go.

    Attributes:
        server: What answers in the end.
        size_bytes: About how large the state is.
        names: Who saves and loads there.
        proxy: What is in between.
        rounds_max: In how many rounds, if not in all.
    """

    server: Server
    size_bytes: int
    names: list[str]
    proxy: Proxy | None = None
    rounds_max: int | None = None

    @property
    def endpoint(self) -> str:
        """What clients are told."""
        return (self.proxy or self.server).endpoint


class _Runner:
    """Measures everything, with a progress bar on standard error."""

    def __init__(
        self,
        results: Results,
        names: tuple[str, ...],
        places: tuple[str, ...],
        place: Path,
        timeout_seconds: float,
    ) -> None:
        self._results = results
        self._names = [name for name in CONTENDERS if name in names]
        self._places = places
        self._place = place
        self._timeout_seconds = timeout_seconds
        self._sites: dict[str, _Site] = {}

    def run(self, work: dict[str, Path], limits: Limits, size_bytes: int, is_swept: bool) -> None:
        """The servers, the sweep, then rounds."""
        with ExitStack() as stack:
            self._start(stack, work, limits, size_bytes)
            rounds: int = self._results.settings["rounds"]
            turns = [
                (place, name, index)
                for index in range(rounds)
                for place, name in rotated(
                    [(place, name) for place, site in self._sites.items() for name in site.names],
                    index,
                )
                if index < (self._sites[place].rounds_max or rounds)
            ]
            with progress.shown(len(self._names) + len(turns), "touching memory") as tell:
                memory.warm(size_bytes)
                for name in self._names:
                    tell(f"sweep: {name}", 0)
                    self._prepare(name, is_swept)
                    tell("", 1)
                for place, name, index in turns:
                    tell(f"round {index + 1}: {name}, {place}", 0)
                    if place == MIRRORED:
                        self._stores(index, size_bytes)
                    else:
                        self._turn(place, name, index)
                    tell("", 1)

    def _start(
        self, stack: ExitStack, work: dict[str, Path], limits: Limits, size_bytes: int
    ) -> None:
        cores = self._results.settings["server_cores"]
        in_memory = stack.enter_context(Server(work[MEMORY] / "server", cores))
        sites = {MEMORY: _Site(in_memory, size_bytes, self._names)}
        if DISK in self._places:
            on_disk = stack.enter_context(Server(work[DISK] / "server", cores))
            sites[DISK] = _Site(on_disk, size_bytes, self._names)
        for place, held_to, nbytes, peers in (
            (PROXIED, Limits(), size_bytes, ()),
            (PACED, limits, size_bytes, (CONNECTOR,)),
            (SMALL, limits, _MIB, (CONNECTOR,)),
        ):
            if place in self._places:
                proxy = stack.enter_context(Proxy(in_memory.address, held_to, cores))
                names = [name for name in self._names if name in (PENSTOCK, *peers)]
                sites[place] = _Site(in_memory, nbytes, names, proxy)
        if LARGE in self._places:
            names = [name for name in self._names if name == PENSTOCK]
            nbytes = _LARGE_TIMES_SIZE * size_bytes
            sites[LARGE] = _Site(in_memory, nbytes, names, rounds_max=1)
        names = [name for name in self._names if name == PENSTOCK]
        sites[MIRRORED] = _Site(in_memory, size_bytes, names)
        self._sites = {place: site for place, site in sites.items() if place in self._places}

    def _prepare(self, name: str, is_swept: bool) -> None:
        """The best settings of a contender, and what it loads if it saves nothing."""
        contender = CONTENDERS[name]
        best = {operation: found[0] for operation, found in contender.settings.items()}
        self._results.best[name] = best
        if name == STREAMER:
            for site in self._sites.values():
                if name in site.names:
                    self._process(site, self._task(site, name, SAVE, _MODEL))
        site = next(iter(self._sites.values()))
        if not is_swept or name not in site.names or contender.is_missing():
            return
        for operation, settings in contender.settings.items():
            if len(settings) == 1:
                continue
            key = _MODEL if name == STREAMER else "sweep"
            found = [self._tried(site, name, operation, key, setting) for setting in settings]
            seconds = {index: one for index, one in enumerate(found) if one is not None}
            if seconds:
                best[operation] = settings[min(seconds, key=lambda index: seconds[index])]
        site.server.remove("sweep")

    def _tried(
        self, site: _Site, name: str, operation: str, key: str, setting: Setting
    ) -> float | None:
        """Seconds at a setting, the better of two; what it saved stays, for loads."""
        tried = []
        for _ in range(_SWEEP_RUNS):
            if operation == SAVE:
                site.server.remove(key)
            task = replace(self._task(site, name, operation, key), setting=setting)
            tried.append(self._process(site, task))
        seconds = [found["seconds"] for found in tried if "error" not in found]
        self._results.sweep.append(
            {
                "row": name,
                "operation": operation,
                "setting": setting,
                "seconds": seconds,
                "error": next((found["error"] for found in tried if "error" in found), None),
            }
        )
        return min(seconds, default=None)

    def _turn(self, place: str, name: str, index: int) -> None:
        site = self._sites[place]
        if name == STREAMER:
            self._measure(place, self._task(site, name, LOAD, _MODEL), index)
            return
        key = f"{name}-{index}"
        if self._measure(place, self._task(site, name, SAVE, key), index):
            self._measure(place, self._task(site, name, LOAD, key), index)
            if place == PROXIED and name == PENSTOCK:
                self._measure(place, self._partial(site, key), index)
        site.server.remove(key)

    def _stores(self, index: int, size_bytes: int) -> None:
        site = self._sites[MIRRORED]
        directory = self._place / "stores"
        directory.mkdir()
        key = f"{MIRRORED}-{index}"
        cores = self._results.settings["client_cores"]
        task = StoreTask(site.endpoint, key, str(directory), size_bytes, cores, _STORE_SAVES)
        (found,) = process.run(worker.run_stores, [task], self._place, self._timeout_seconds)
        nbytes = worker.describe(size_bytes).nbytes
        for place in STORES:
            sample = Sample(place, PENSTOCK, SAVE, index, nbytes, found.get(place, 0.0))
            sample.error = found.get("error")
            self._results.samples.append(sample)
        shutil.rmtree(directory)
        site.server.remove(key)

    def _measure(self, place: str, task: Task, index: int) -> bool:
        site = self._sites[place]
        if place == DISK:
            settle(self._place, seconds_max=_SETTLE_SECONDS_MAX)
        spec = worker.describe(site.size_bytes)
        wanted = [one for one in spec.tensors if not task.names or one.name in task.names]
        operation = PARTIAL if task.names else task.operation
        sample = Sample(place, task.contender, operation, index, sum(one.nbytes for one in wanted))
        if task.names:
            sample.runs = layout.runs(site.server.files(task.key), task.names)
        site.server.answered(worker.WARM_UP)
        before = site.proxy.counts() if site.proxy else {}
        used = site.server.cpu_seconds
        found = self._process(site, task)
        after = site.proxy.counts() if site.proxy else {}
        sample.traffic = {name: after[name] - before[name] for name in after}
        sample.server_cpu_seconds = site.server.cpu_seconds - used
        answered = site.server.answered(worker.WARM_UP)
        sample.requests = dict(Counter(name for name, _ in answered))
        sample.completing_seconds = sum(took for name, took in answered if name == _COMPLETING)
        sample.error = found.get("error")
        for field in ("seconds", "cpu_seconds", "extra_bytes"):
            setattr(sample, field, found.get(field, 0))
        self._results.samples.append(sample)
        return sample.error is None

    def _partial(self, site: _Site, key: str) -> Task:
        """A load of a third of the tensors, in runs of neighbours in the files."""
        names = layout.names(site.server.files(key))
        wanted = [name for at, name in enumerate(names) if at % _RUN_EVERY < _RUN_TENSORS]
        return replace(
            self._task(site, PENSTOCK, LOAD, key), names=tuple(wanted), is_warmed_up=False
        )

    def _task(self, site: _Site, name: str, operation: str, key: str) -> Task:
        return Task(
            contender=name,
            setting=self._results.best[name][operation],
            operation=operation,
            endpoint=site.endpoint,
            key=key,
            size_bytes=site.size_bytes,
            cores=self._results.settings["client_cores"],
        )

    def _process(self, site: _Site, task: Task) -> dict[str, Any]:
        contender = CONTENDERS[task.contender]
        if contender.is_missing():
            return {"error": f"{contender.package} is not installed: run make bench-objects"}
        (found,) = process.run(worker.run, [task], self._place, self._timeout_seconds)
        site.server.remove(worker.WARM_UP)
        return found


if __name__ == "__main__":
    main()
