"""The command behind `make bench SUITE=exporting`: directories of models, made of checkpoints."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.table import Table

import penstock
from penstock.common.machine.quiesce import settle
from penstock.plugin import RankAttempt, of_tensor, to_native, to_source
from penstock_bench.harness import fio, machine
from penstock_bench.harness.cache import drop_everything
from penstock_bench.harness.machine import workplace
from penstock_bench.harness.options import (
    QUICK_ROUNDS,
    ROOT,
    ROUNDS,
    common,
    output_directory,
    show,
)

if TYPE_CHECKING:
    from pathlib import Path

_LAYERS, _QUICK_LAYERS = 64, 4
_ROWS, _COLUMNS = 4096, 4096
_RANKS = 4


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@common
def main(rounds: int | None, quick: bool, directory: Path, output: Path | None) -> None:
    """A model saved whole is linked; one that ranks saved in pieces is put together.

    fio reads and writes as many bytes at the same time, which is what putting it together takes.
    """
    directory = directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    layers = _QUICK_LAYERS if quick else _LAYERS
    nbytes = layers * _ROWS * _COLUMNS * 4
    results: dict[str, Any] = {
        "command": sys.argv[1:],
        "machine": machine.describe(ROOT),
        "disk": machine.disk(directory),
        "nbytes": nbytes,
        "rounds": rounds or (QUICK_ROUNDS if quick else ROUNDS),
        "samples": [],
    }
    with workplace(directory, 6 * nbytes) as place:
        _make(place, layers)
        for number in range(results["rounds"]):
            ways = [_linked, _assembled, _copied_by_fio]
            sample = {}
            for way in ways[number % 3 :] + ways[: number % 3]:
                settle(place)
                drop_everything(place.rglob("*.safetensors"))
                sample[way.__name__.strip("_")] = way(place, nbytes)
            results["samples"].append(sample)
    where = output_directory(output)
    (where / "export.json").write_text(json.dumps(results, indent=1))
    show(_table(results), where, "export")


def _make(place: Path, layers: int) -> None:
    """One checkpoint saved whole as a group, and one in pieces of ranks."""
    generator = torch.Generator().manual_seed(1)
    model = {
        f"layers.{index}.weight": torch.randn(_ROWS, _COLUMNS, generator=generator)
        for index in range(layers)
    }
    penstock.save(place / "whole", {"model": model}, groups={"model": ""})
    attempt = RankAttempt.begin(str(place / "pieces"), overwrite=False)
    options = to_native(None)
    rows = _ROWS // _RANKS
    votes = {}
    for rank in reversed(range(_RANKS)):
        sources = [
            to_source(
                of_tensor(tensor[rank * rows : (rank + 1) * rows], name),
                f"model.{name}",
                (f"model.{name}", (_ROWS, _COLUMNS), (rank * rows, 0)),
            )
            for name, tensor in model.items()
        ]
        if rank:
            joined = RankAttempt.join(attempt.path, attempt.id, rank)
            votes[rank] = joined.write(rank, sources, options)
        else:
            attempt.write_shards(rank, sources, options)
    leaves = {
        name: {
            "$": "tensor",
            "g": f"model.{name}",
            "dtype": "float32",
            "shape": [_ROWS, _COLUMNS],
        }
        for name in model
    }
    votes[0] = attempt.write_part(json.dumps({"model": leaves}))
    attempt.commit(votes, metadata="{}", overwrite=False)


def _linked(place: Path, nbytes: int) -> float:
    report = penstock.export(place / "whole", place / "linked", hard_link=True)
    assert report.bytes_written == 0
    shutil.rmtree(place / "linked")
    return report.seconds


def _assembled(place: Path, nbytes: int) -> float:
    report = penstock.export(place / "pieces", place / "assembled")
    assert report.bytes_written == nbytes
    shutil.rmtree(place / "assembled")
    return report.seconds


def _copied_by_fio(place: Path, nbytes: int) -> float:
    """Reads a file and writes another one, durably, both at once."""
    shared = [
        f"--directory={place}",
        f"--size={nbytes}",
        "--ioengine=io_uring",
        "--direct=1",
        "--bs=1m",
        "--iodepth=16",
        "--iomem_align=2m",
        "--fallocate=native",
    ]
    source = place / "fio.source"
    told = ["fio", "--output-format=json", "--name=global", *shared]
    if not source.exists():
        fio.job([*told, "--name=write", f"--filename={source.name}", "--rw=write", "--end_fsync=1"])
        settle(place)
    reading = ["--name=read", f"--filename={source.name}", "--rw=read"]
    writing = ["--name=write", "--filename=fio.copy", "--rw=write", "--end_fsync=1"]
    jobs = fio.jobs([*told, *reading, *writing])
    (place / "fio.copy").unlink()
    seconds: float = max(one["job_runtime"] for one in jobs) / 1000
    return seconds


def _table(results: dict[str, Any]) -> Table:
    samples = results["samples"]
    title = f"{results['nbytes'] / 1e9:.1f} GB, {len(samples)} rounds"
    table = Table("what", "seconds, median", "lowest", "highest", title=title)
    for name in ("linked", "assembled", "copied_by_fio"):
        times = [sample[name] for sample in samples]
        median = statistics.median(times)
        table.add_row(name, f"{median:.3f}", f"{min(times):.3f}", f"{max(times):.3f}")
    ratios = [sample["copied_by_fio"] / sample["assembled"] for sample in samples]
    table.add_row(
        "rate of fio's, assembled",
        f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}",
        f"{max(ratios):.2f}",
    )
    return table


if __name__ == "__main__":
    main()
