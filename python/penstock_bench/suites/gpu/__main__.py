"""The command behind `make gpu`."""

from __future__ import annotations

import gc
import re
import shutil
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch

from penstock.common.machine import gpus
from penstock_bench.harness import machine
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.options import (
    QUICK_ROUNDS,
    ROOT,
    common,
    names_option,
    output_directory,
)
from penstock_bench.harness.suite import Steps
from penstock_bench.suites.gpu import asking, link, loading, promises, saving
from penstock_bench.suites.gpu.accelerators import NoGpuError, accelerator
from penstock_bench.suites.gpu.results import Results, markdown
from penstock_bench.suites.gpu.run import OverError, Run
from penstock_bench.workloads import scaling

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_bench.suites.gpu.accelerators import Accelerator

GROUPS: dict[str, tuple[Callable[[Run], None], float, tuple[str, ...]]] = {
    "link": (link.measure, 5, ()),
    "pinning": (link.pinning, 2, ("pinning",)),
    "conformance": (promises.conformance, 10, ("conformance",)),
    "stalls": (
        saving.stalls,
        45,
        ("staging", "stall", "stall_dcp", "lazy_stall", "pinned_again"),
    ),
    "load-memory": (
        loading.from_memory,
        70,
        ("load_memory", "load_fastsafetensors", "load_safetensors", "load_instanttensor"),
    ),
    "steps": (saving.steps, 15, ("lazy_steps",)),
    "graphs": (promises.graphs, 15, ("graphs",)),
    "gather": (asking.gather, 25, ("gather_1k", "gather_4k", "gather_disk")),
    "ring": (asking.ring, 15, ("ring_latency", "ring_rate", "ring_reads")),
    "saves": (saving.whole, 50, ("save_memory", "save_disk")),
    "load-disk": (loading.from_disk, 70, ("load_fio", "load_kvikio", "load_cufile")),
    "torn": (promises.torn, 30, ("torn",)),
    "leaks": (promises.leaks, 30, ("leaks",)),
}
"""Groups of measurements in their order, with their part of the time and their rows."""

_ROUNDS = 3
_SIZE_BYTES, _SMALL_BYTES = 10_000_000_000, 48 << 20
_FREE_BYTES = 4 * _SMALL_BYTES
_SLACK = 1.3
"""A group may take so many times its part of the time that is left."""
_PARTS_OF_GPU, _PARTS_OF_MEMORY, _PARTS_OF_PLACE = 3, 8, 3
"""A state, one that is loaded, and what PyTorch keeps; copies; checkpoints side by side."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@names_option("--only", "groups", tuple(GROUPS), "Groups, separated by commas")
@common
@click.option("--memory", type=click.Path(path_type=Path), default="/dev/shm", help="A tmpfs.")
@click.option("--minutes", type=click.FloatRange(min=0.1), default=20.0, show_default=True)
@click.option("--gigabytes", type=click.FloatRange(min=0.01), help="Of the large state. [10]")
@click.option(
    "--resume",
    type=click.Path(path_type=Path, file_okay=False),
    help="A directory with a file of results for each kind of GPU. Continues them: begins with "
    "groups that they lack, leaves out whole ones, and writes them back after each round.",
)
def main(
    groups: tuple[str, ...],
    rounds: int | None,
    quick: bool,
    directory: Path,
    output: Path | None,
    memory: Path,
    minutes: float,
    gigabytes: float | None,
    resume: Path | None,
) -> None:
    """Everything that is promised of GPUs, measured on this one."""
    begun = time.monotonic()
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(memory).free < _FREE_BYTES:
        raise click.UsageError(
            f"{memory} has {shutil.disk_usage(memory).free / 1e6:.0f} MB free: name a larger tmpfs "
            "by --memory (in a container: docker run --shm-size 32g)"
        )
    try:
        with accelerator() as device:
            is_small = quick or device.is_stand_in
            size = _SMALL_BYTES if is_small else int((gigabytes or _SIZE_BYTES / 1e9) * 1e9)
            with (
                workplace(memory, _FREE_BYTES) as in_memory,
                workplace(directory, _FREE_BYTES) as on_disk,
            ):
                room, what = _room(in_memory, on_disk)
                if room < size:
                    size = room
                    click.echo(f"{size / 1e9:.2f} GB at a time: {what} has no more room", err=True)
                results = _results(device, in_memory, on_disk)
                results.settings = {
                    "command": sys.argv[1:],
                    "rounds": rounds or (QUICK_ROUNDS if is_small else _ROUNDS),
                    "size_bytes": size,
                    "room_bytes": room,
                    "room_of": what,
                    "minutes": minutes,
                    "seconds": 0.0,
                }
                where = output_directory(output)
                files = [where / "gpu.json"]
                if resume is not None:
                    files.append(_continue(results, resume))
                order = _order(results, groups)

                def save() -> None:
                    _write(results, files)

                with Steps() as steps:
                    run = Run(
                        device=device,
                        results=results,
                        size_bytes=size,
                        rounds=results.settings["rounds"],
                        memory=in_memory,
                        disk=on_disk,
                        deadline=begun + minutes * 60,
                        is_small=is_small,
                        progress=steps.say,
                        save=save,
                    )
                    for number, name in enumerate(steps.each(order)):
                        run.end_group(_share(begun + minutes * 60, order[number:]))
                        _measure(run, name)
                        results.settings["seconds"] = time.monotonic() - begun
                        _write(results, files)
                for name in set(GROUPS).difference(order):
                    for row in GROUPS[name][2]:
                        results.skip(row, "it was left out by --only")
    except NoGpuError as error:
        raise click.UsageError(
            f"there is no GPU to measure on: {error}. `penstock doctor` says more; "
            "PENSTOCK_CUDA_DRIVER with the driver for tests shows that everything runs"
        ) from error
    click.echo(_write(results, files))
    click.echo(f"{where}: gpu.json, gpu.md")


def _continue(results: Results, directory: Path) -> Path:
    """Takes over the results for this kind of GPU, if there are any; returns their file."""
    name = re.sub(r"[^a-z0-9]+", "-", results.gpu["name"].lower()).strip("-")
    path = directory / f"{name}.json"
    try:
        if path.exists():
            results.continue_from(path)
    except ValueError as error:
        raise click.UsageError(f"--resume {error}") from error
    directory.mkdir(parents=True, exist_ok=True)
    return path


def _order(results: Results, groups: tuple[str, ...]) -> list[str]:
    """The groups to measure: those never measured, then those of which rounds are missing."""
    left = [name for name in GROUPS if name in groups and not results.is_whole(name)]
    return sorted(left, key=lambda name: name in results.groups)


def _share(end: float, names: list[str]) -> float:
    """When the first of these groups has to be over, so that the others have time as well."""
    now = time.monotonic()
    share = _SLACK * GROUPS[names[0]][1] / sum(GROUPS[name][1] for name in names)
    return now + min(1.0, share) * (end - now)


def _write(results: Results, files: list[Path]) -> str:
    """All that there is so far; returns the table."""
    for file in files:
        results.write(file)
    text = markdown(results)
    files[0].with_suffix(".md").write_text(text)
    return text


def _measure(run: Run, name: str) -> None:
    """One group; whatever goes wrong is the reason of its rows."""
    measure, _, rows = GROUPS[name]
    results = run.results
    results.forget(name, rows)
    figures = set(results.figures)
    reason, is_whole = "", False
    begun = time.monotonic()
    try:
        measure(run)
        is_whole = not run.is_over()
    except OverError:
        reason = f"its part of the {results.settings['minutes']:g} minutes was over"
    except Exception as error:
        reason = f"failed: {type(error).__name__}: {error}"
        click.echo(f"{name} {reason}", err=True)
        traceback.print_exc()
    for row in rows:
        results.skip(row, reason or "the measurement gave no value")
    results.groups[name] = {
        "is_whole": is_whole,
        "seconds": time.monotonic() - begun,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": results.machine["revision"],
        "figures": sorted(set(results.figures) - figures),
    }
    gc.collect()
    run.device.release()


def _room(in_memory: Path, on_disk: Path) -> tuple[int, str]:
    """The largest state that fits everywhere, and where it is tightest."""
    rooms = {
        "the GPU": gpus.probe_driver(0).gpus[0].free_bytes // _PARTS_OF_GPU,
        "memory": scaling.memory_bytes() // _PARTS_OF_MEMORY,
        "tmpfs (--memory)": shutil.disk_usage(in_memory).free // _PARTS_OF_PLACE,
        "the disk (--directory)": shutil.disk_usage(on_disk).free // _PARTS_OF_PLACE,
    }
    return min((room, what) for what, room in rooms.items())


def _results(device: Accelerator, in_memory: Path, on_disk: Path) -> Results:
    driver = gpus.probe_driver(0)
    gpu = driver.gpus[0]
    return Results(
        machine={
            **machine.describe(ROOT),
            "peers": {name: machine.package_version(name) for name in PEERS},
        },
        gpu={
            "name": gpu.name,
            "pci_bus_id": gpu.pci_bus_id,
            "memory_bytes": gpu.total_bytes,
            "cuda": driver.version,
            "driver": driver.path,
            "bus_gb_per_second": gpus.bus_gb_per_second(gpu.pci_bus_id),
            "torch": torch.__version__,
            "is_stand_in": device.is_stand_in,
        },
        places={"tmpfs": machine.disk(in_memory), "disk": machine.disk(on_disk)},
        settings={},
    )


PEERS = ("safetensors", "fastsafetensors", "instanttensor", "kvikio-cu13", "cupy-cuda13x")


if __name__ == "__main__":
    main()
