"""Saves and loads a state of tensors in each of several processes."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import crew
import numpy as np

import penstock
from penstock.planning.models.units import BYTES
from penstock_bench.harness import storage
from penstock_bench.harness.cases import tensor_sizes


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--size", required=True)
    parser.add_argument("--engine", default="auto")
    given = parser.parse_args()
    does = functools.partial(_work, _bytes(given.size), given.engine)
    crew.run(given.work, given.processes, does)


def _work(size: int, engine: str, worker: crew.Worker) -> None:
    options = penstock.Options(engine=engine)
    generator = np.random.default_rng(worker.index)
    state = {
        f"tensor-{number}": generator.integers(0, 256, nbytes, np.uint8)
        for number, nbytes in enumerate(tensor_sizes(size))
    }
    nbytes = sum(one.nbytes for one in state.values())
    place = worker.work / f"checkpoint-{worker.index}"
    loaded = {}

    def save() -> int:
        penstock.save(place, state, options=options, no_dist=True)
        return nbytes

    def load() -> int:
        loaded.update(penstock.load(place, options=options))
        return nbytes

    worker.phase("save", save)
    storage.drop(place.iterdir())
    worker.phase("load", load)
    worker.to_verify = len(state) + 1
    worker.verified = sum(np.array_equal(loaded[name], one) for name, one in state.items())
    worker.verified += penstock.verify(place).ok


def _bytes(text: str) -> int:
    """Parses a size such as ``64M`` as fio does: in powers of two."""
    number = text.rstrip("KMGTiB")
    unit = text[len(number) :].rstrip("iB")
    return int(int(number) * BYTES[f"{unit}iB" if unit else "B"])


if __name__ == "__main__":
    main()
