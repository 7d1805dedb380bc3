"""The command behind `make bench SUITE=exporting`: directories of models, made of checkpoints."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import torch

import penstock
from penstock.common.machine.quiesce import quiesce
from penstock.plugin import RankAttempt, of_tensor, to_native, to_source
from penstock_bench.harness import fio, tables
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.storage import drop_everything
from penstock_bench.harness.suite import Report, Run, suite
from penstock_bench.results.samples import Sample

if TYPE_CHECKING:
    from pathlib import Path

_LAYERS, _QUICK_LAYERS = 64, 4
_ROWS, _COLUMNS = 4096, 4096
_RANKS = 4


LINKED, ASSEMBLED, COPIED = "linked", "assembled", "copied by fio"
WAYS = {
    LINKED: "a model saved whole as a group: files are linked",
    ASSEMBLED: "a model that ranks saved in pieces, put together",
    COPIED: "fio reads as many bytes and writes them, both at the same time",
}


@suite("export", WAYS, "What is measured", preload=[])
def main(run: Run) -> Report:
    """A model saved whole is linked; one that ranks saved in pieces is put together.

    fio reads and writes as many bytes at the same time, which is what putting it together takes.
    """
    layers = _QUICK_LAYERS if run.is_quick else _LAYERS
    nbytes = layers * _ROWS * _COLUMNS * 4
    ways = {LINKED: _linked, ASSEMBLED: _assembled, COPIED: _copied_by_fio}
    results = run.results
    with run.at_work(6 * nbytes, nbytes=nbytes) as place:
        _make(place, layers)
        for index, name in run.in_rounds(run.names):
            quiesce(place)
            drop_everything(place.rglob("*.safetensors"))
            sample = Sample(name, index, nbytes=nbytes)
            try:
                sample.seconds = ways[name](place, nbytes)
            except FioError as error:
                sample.error = str(error)
            results.samples.append(sample)
    table = tables.figures(
        f"{nbytes / 1e9:.1f} GB, {run.rounds} interleaved rounds, median [least, most]",
        ["seconds"],
        {name: [tables.cell(results.spread(name), ".3f")] for name in run.names},
    )
    ratio = tables.ratios([("rate of fio's, assembled", results.ratio(COPIED, ASSEMBLED))])
    return Report(tables.page(results, table, *tables.notes(results.errors(), WAYS), ratio), {})


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
    shared = fio.command(
        name="global", directory=place, size=nbytes, bs="1m", iodepth=16, fallocate="native"
    )
    source = place / "fio.source"
    if not source.exists():
        fio.job(
            [*shared, "--name=write", f"--filename={source.name}", "--rw=write", "--end_fsync=1"]
        )
        quiesce(place)
    reading = ["--name=read", f"--filename={source.name}", "--rw=read"]
    writing = ["--name=write", "--filename=fio.copy", "--rw=write", "--end_fsync=1"]
    jobs = fio.jobs([*shared, *reading, *writing])
    (place / "fio.copy").unlink()
    seconds: float = max(one["job_runtime"] for one in jobs) / 1000
    return seconds


if __name__ == "__main__":
    main()
