"""Loads into memory of the GPU, ours and those of others, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import penstock
from penstock_bench.harness import storage
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.running import rotated, run_module
from penstock_bench.harness.storage import files_below
from penstock_bench.suites.gpu import accelerators
from penstock_bench.suites.gpu.loader import SMALL_BYTES, small
from penstock_bench.suites.gpu.run import remove
from penstock_bench.suites.save_load import fio

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_bench.suites.gpu.run import Run

_OURS = "penstock"
_PACKAGES = {
    "safetensors": "safetensors",
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
    "kvikio": "kvikio",
    "cufile": "kvikio",
}
_LOADER = "penstock_bench.suites.gpu.loader"
_SECONDS_MAX = 90.0
_PART_BYTES = 16 << 20


def from_memory(run: Run) -> None:
    """From tmpfs: what is not the link is ours."""
    nbytes = accelerators.size(run.size_bytes)
    place = run.memory / "loads"
    whos = ["safetensors", "fastsafetensors", "instanttensor"]
    rows = {who: f"load_{who}" for who in whos}
    loads = _Loads(run, place, rows)
    for number in run.each_round("loads from tmpfs"):
        link = run.link("to_device")
        seconds = loads.round(number)
        run.results.add("load_memory", nbytes / seconds[_OURS] / 1e9 / link)
        for who, row in rows.items():
            if who in seconds:
                run.results.add(row, seconds[who] / seconds[_OURS])
    remove(place)


def from_disk(run: Run) -> None:
    """From the disk, with nothing of it in memory; fio reads as many bytes."""
    nbytes = accelerators.size(run.size_bytes)
    place = run.disk / "loads"
    rows = {"kvikio": "load_kvikio", "cufile": "load_cufile"}
    loads = _Loads(run, place, rows)
    reads = _fio(run, nbytes)
    for number in run.each_round("loads from the disk"):
        seconds = loads.round(number, reads)
        if reads is not None:
            run.results.add("load_fio", seconds["fio"] / seconds[_OURS])
        for who, row in rows.items():
            if who in seconds:
                run.results.add(row, seconds[who] / seconds[_OURS])
    remove(place)


def _fio(run: Run, nbytes: int) -> Callable[[], float] | None:
    """A function that reads as many bytes at fio's best setting and returns its seconds."""
    place = run.disk / "fio"
    place.mkdir()
    try:
        if run.is_small:
            best = fio.settings(is_quick=True)[0]
            fio.run(best, "save", place, nbytes)
        else:
            run.progress("fio, at some settings")
            tried = fio.settings(is_quick=True)
            fio.run(tried[0], "save", place, nbytes)
            part = min(nbytes, 2 << 30)
            rates = {one: fio.run(one, "load", place, part).gb_per_second for one in tried}
            best = max(rates, key=lambda one: rates[one])
            run.results.notes["load_fio"] = f"fio's best: {best}"
            run.results.settings["fio"] = {str(one): rate for one, rate in rates.items()}
    except FioError as error:
        run.results.skip("load_fio", str(error))
        return None
    return _reads_of_fio(best, place, nbytes)


def _reads_of_fio(best: fio.Setting, place: Path, nbytes: int) -> Callable[[], float]:
    def read() -> float:
        found = fio.run(best, "load", place, nbytes)
        # In whole blocks.
        return max(found.seconds, 1e-3) * nbytes / found.nbytes

    return read


class _Loads:
    """One state, as a checkpoint and as a file of safetensors."""

    def __init__(self, run: Run, place: Path, rows: dict[str, str]) -> None:
        self._run = run
        self._where = "tmpfs" if place.is_relative_to(run.memory) else "the disk"
        place.mkdir()
        self._paths = {_OURS: place / "checkpoint"}
        theirs = place / "state.safetensors"
        for who, row in rows.items():
            reason = _missing(run, who)
            if reason is None:
                self._paths[who] = theirs
            else:
                run.results.skip(row, reason)
        for nbytes, of in ((run.size_bytes, lambda path: path), (SMALL_BYTES, small)):
            state = accelerators.state(run.device, nbytes)
            penstock.save(of(self._paths[_OURS]), state)
            if theirs in self._paths.values():
                from safetensors.torch import save_file

                host = {name: run.device.read(tensor) for name, tensor in state.items()}
                save_file(host, of(theirs))
        del state
        # Loads have a process each.
        run.device.release()
        self._rows = rows
        if place.is_relative_to(run.memory):
            # The kernel moves pages in its lists when they are read for the first two times.
            for path in (self._paths[_OURS], theirs):
                for file in files_below(path) if path.is_dir() else [path]:
                    _read_twice(Path(file))

    def round(self, number: int, fio_reads: Callable[[], float] | None = None) -> dict[str, float]:
        """Seconds of everybody once."""
        seconds: dict[str, float] = {}
        whos = [*self._paths, *(["fio"] if fio_reads is not None else [])]
        for who in rotated(whos, number):
            if who == "fio" and fio_reads is not None:
                seconds[who] = fio_reads()
            else:
                found = self._load(who, checks=number == 0)
                if found is None:
                    continue
                seconds[who] = found
            rate = accelerators.size(self._run.size_bytes) / seconds[who] / 1e9
            self._run.results.figure(f"load from {self._where}, {who}, GB/s", rate)
        return seconds

    def _load(self, who: str, *, checks: bool) -> float | None:
        path = self._paths[who]
        storage.drop(files_below(path) if path.is_dir() else [path])
        job = {"who": who, "path": str(path), "nbytes": self._run.size_bytes, "checks": checks}
        seconds_max = min(_SECONDS_MAX, self._run.left())
        found = run_module(_LOADER, job, timeout_seconds=seconds_max)
        error = found.get("error")
        if error is None and found.get("wrong") is not None:
            error = f"{found['wrong']} is not what was saved"
        if error is None:
            return float(found["seconds"])
        if who == _OURS:
            raise RuntimeError(f"the load failed: {error}")
        self._run.results.skip(self._rows[who], f"{who} failed: {error}")
        del self._paths[who]
        return None


def _read_twice(path: Path) -> None:
    if not path.exists():
        return
    parts = range(0, path.stat().st_size, _PART_BYTES)

    def read(file: BinaryIO, start: int) -> None:
        os.preadv(file.fileno(), [bytearray(_PART_BYTES)], start)

    with path.open("rb") as file, ThreadPoolExecutor(os.cpu_count()) as executor:
        for _ in range(2):
            list(executor.map(partial(read, file), parts))


def _missing(run: Run, who: str) -> str | None:
    """Why somebody cannot load here."""
    if run.device.is_stand_in:
        return f"{who} loads by CUDA of PyTorch or of its own"
    if importlib.util.find_spec(_PACKAGES[who]) is None:
        return f"{_PACKAGES[who]} is not installed: `make gpu` installs requirements/gpu.txt"
    return None
