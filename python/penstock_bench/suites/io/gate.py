"""Whether `penstock bench compare` alarms when it should, and only then, on a real disk.

```
python -m penstock_bench.suites.io.gate DIRECTORY --trials 20
```

A trial measures three builds in turns, round by round: this one, this one again, and one that is
slowed. The second is compared with the first, which must be no alarm, and the third, which must be
one. Rounds are compared with each other (`penstock bench compare --paired`). `--apart` measures one
build after the other instead, as a CI job has it that compares with a stored baseline: how the disk
has changed meanwhile then looks like a change of the build.

The slowed build makes eleven requests for every ten that count: it moves a tenth more bytes than it
reports, by the same code, on the same disk, at the same time. That lengthens a run by a tenth
whatever bounds the disk (bytes, requests, latency), and with the noise that a run so much longer
has. Rejected were a limit of the control group, which is an absolute rate where that of the disk
drifts, and stopping the process now and then, which the requests in flight do not notice.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from penstock.cli import endings
from penstock.common.machine import facts
from penstock_bench.harness import cases
from penstock_bench.harness.cases import Case
from penstock_bench.harness.running import BenchError, rotated, run
from penstock_bench.harness.suite import Steps
from penstock_bench.results.compare import MARGIN, compare
from penstock_bench.results.results import Results

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock_bench.results.compare import Compared
    from penstock_bench.results.results import Measurement

CASES = (Case(), Case(pattern="read"))
"""1 MiB x 16, direct: writes with their sync, and reads of what is in no cache."""

EXTRA = 10
"""The slowed build makes one request in this many twice."""

BUILDS = ("before", "same", "slowed")

FALSE_ALARMS_MAX = 0
MISSED_PART_MAX = 1 / 20


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--trials", type=click.IntRange(1), default=20, show_default=True)
@click.option("--rounds", type=click.IntRange(3), default=15, show_default=True)
@click.option("--size-mib", type=click.IntRange(10), default=320, show_default=True)
@click.option("--margin", type=click.FloatRange(0, 1), default=MARGIN, show_default=True)
@click.option("--apart", is_flag=True, help="One build after the other, not in turns.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="A directory for the results of each build: TRIAL/before.json, same.json, slowed.json.",
)
def main(
    directory: Path,
    trials: int,
    rounds: int,
    size_mib: int,
    margin: float,
    apart: bool,
    output: Path | None,
) -> None:
    """Count the alarms between equal builds, and those at one that is slowed by a tenth."""
    if size_mib % EXTRA:
        raise click.UsageError(f"a tenth more of {size_mib} MiB is no whole number of requests")
    out = Console(highlight=False)
    alarms = dict.fromkeys(BUILDS[1:], 0)
    with Steps() as steps:
        for trial in range(trials):
            try:
                with endings.tidy():
                    measured = _measure(directory.resolve(), rounds, size_mib, apart, steps)
            except BenchError as error:
                raise click.ClickException(str(error)) from error
            if output is not None:
                _write(measured, output / f"{trial:02}")
            for build in BUILDS[1:]:
                found = compare(
                    measured["before"], measured[build], margin=margin, is_paired=not apart
                )
                alarms[build] += any(one.verdict == "slower" for one in found)
                for line in _lines(found):
                    out.print(f"{trial + 1:3}  {build:7} {line}")
    out.print(f"alarms at the same build:   {alarms['same']} of {trials} (bar: none)")
    out.print(f"alarms at the slowed build: {alarms['slowed']} of {trials} (bar: 19 of 20)")
    missed = trials - alarms["slowed"]
    sys.exit(alarms["same"] > FALSE_ALARMS_MAX or missed > MISSED_PART_MAX * trials)


def _measure(
    directory: Path, rounds: int, size_mib: int, apart: bool, steps: Steps
) -> dict[str, Results]:
    work = directory / f".penstock-gate-{os.getpid()}"
    machine, disk = facts.machine(), facts.disk(directory)
    settings = {"size_bytes": size_mib * cases.MIB, "rounds": rounds, "apart": apart}
    measured = {
        build: Results(
            kind="io",
            machine=machine,
            disk=disk,
            settings={**settings, "build": build},
            cases={case.label: case.as_json() for case in CASES},
        )
        for build in BUILDS
    }
    order = _order(rounds, apart)
    for number, case, build in steps.each(order, lambda one: f"round {one[0] + 1}: {one[2]}"):
        made = _once(case, build, work, size_mib, number)
        measured[build].measurements.append(made)
    return measured


def _order(rounds: int, apart: bool) -> Iterator[tuple[int, Case, str]]:
    """The order of measurements: in turns, the builds of a round come close together."""
    if apart:
        for build in BUILDS:
            yield from ((number, case, build) for number in range(rounds) for case in CASES)
        return
    for number in range(rounds):
        for case in CASES:
            yield from ((number, case, build) for build in rotated(BUILDS, number))


def _once(case: Case, build: str, work: Path, size_mib: int, number: int) -> Measurement:
    size = size_mib * cases.MIB
    moved = size + size // EXTRA if build == "slowed" else size
    made = run(case, work, moved, seed=1, verifies=False, round_index=number)
    return dataclasses.replace(made, nbytes=made.nbytes * size // moved)


def _write(measured: dict[str, Results], place: Path) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for build, results in measured.items():
        results.write(place / f"{build}.json")


def _lines(found: list[Compared]) -> Iterator[str]:
    for one in found:
        pattern = one.case.partition(",")[0]
        yield f"{pattern:6} {one.ratio:.3f} [{one.low:.3f}, {one.high:.3f}] {one.verdict}"


if __name__ == "__main__":
    main()
