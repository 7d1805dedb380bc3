"""A benchmark of checkpoints, as each rank of it runs it.

All ranks do the same in the same order (`operations`). A writer that fails is not tried again, and
the others go on.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from penstock import _native
from penstock.common.machine.quiesce import quiesce_after
from penstock_bench.peers.checkpoint import WRITERS
from penstock_bench.results.results import Measurement
from penstock_bench.suites.checkpoint.operations import WriterError, load, save, summed_up, together
from penstock_bench.workloads.content import rank_state
from penstock_bench.workloads.models import Model

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_bench.peers.checkpoint.base import Writer
    from penstock_bench.suites.checkpoint.plan import Plan
    from penstock_bench.suites.checkpoint.team import Team

_TOY = Model(vocabulary=64, hidden=64, ffn=128, layers=1, heads=1, kv_heads=1)
"""The state that every writer saves and loads first, so that no first use is timed."""


class Rank:
    """One process of it.

    The first rank emits each measurement, and what is about to be done.
    """

    def __init__(self, plan: Plan, team: Team, emit: Callable[[Measurement | str], None]) -> None:
        self._plan = plan
        self._team = team
        self._emit = (lambda _: None) if team.rank else emit
        self._emit("making the state")
        self._held = rank_state(plan.model, plan.ranks[team.rank]).held()
        self._writers: dict[str, Writer] = {}
        self._nbytes = sum(team.gather(self._held.nbytes))
        self._step = 0

    def run(self) -> None:
        """Measures everything; what it writes is in the plan's directory and removed by the end."""
        try:
            for name in self._plan.writers:
                self._open(name)
            if self._plan.fill is None:
                for number in range(self._plan.rounds):
                    for name in self._in_turn(number):
                        self._round(name, number)
            else:
                for index, case in enumerate(self._plan.cases):
                    for name in self._in_turn(index):
                        self._pass(name, case)
        finally:
            for writer in self._writers.values():
                writer.close()

    def _in_turn(self, number: int) -> list[str]:
        """The writers without those that failed, in any order, and then in the opposite one.

        So nobody comes behind the same one each time. It is the same on all ranks.
        """
        names = self._plan.writers
        order = random.Random(number // 2).sample(names, len(names))
        return [name for name in order[:: -1 if number % 2 else 1] if name in self._writers]

    def _open(self, name: str) -> None:
        """Imports a writer, and saves and loads with it once."""
        self._emit(f"{name}: trying")
        toy = rank_state(_TOY, 0).held()

        def make() -> None:
            self._writers[name] = WRITERS[name].make(self._team.rank, self._team.ranks)

        directory = self._directory(name)
        try:
            together(self._team, make)
            writer = self._writers[name]
            save(self._team, writer, directory, toy, syncs=self._plan.syncs)
            load(self._team, writer, directory, toy, verifies=True)
        except WriterError as error:
            self._give_up(name, next(iter(self._plan.cases)), 0, error)
        self._remove([directory])

    def _round(self, name: str, number: int) -> None:
        """One save and one load."""
        directory = self._directory(name)
        for case, settings in self._plan.cases.items():
            if name in self._writers:
                self._measure(name, case, number, directory, settings["operation"])
        self._remove([directory])

    def _pass(self, name: str, case: str) -> None:
        """Saves until it is full, then removes everything."""
        made: list[Path] = []
        while name in self._writers:
            if not self._team.share(self._plan.has_room(len(made) * self._nbytes, self._nbytes)):
                break
            made.append(self._directory(name))
            self._measure(name, case, len(made) - 1, made[-1], "save")
        self._emit(f"{name}: removing {len(made)} checkpoints")
        self._remove(made)

    def _measure(self, name: str, case: str, number: int, directory: Path, operation: str) -> None:
        self._emit(f"{name}: {case}, {number + 1}")
        writer = self._writers[name]
        try:
            if operation == "save":
                outcomes = save(self._team, writer, directory, self._held, syncs=self._plan.syncs)
            else:
                outcomes = load(
                    self._team, writer, directory, self._held, verifies=self._plan.verifies
                )
        except WriterError as error:
            self._give_up(name, case, number, error)
            return
        self._emit(
            summed_up(outcomes, writer, case=case, by=name, number=number, syncs=self._plan.syncs)
        )

    def _give_up(self, name: str, case: str, number: int, error: WriterError) -> None:
        writer = self._writers.pop(name, None)
        if writer is not None:
            writer.close()
        self._emit(Measurement(case=case, by=name, round_index=number, error=str(error)))
        self._team.renew()

    def _directory(self, name: str) -> Path:
        """A directory that no save was in, named as `CheckpointStore` names its steps."""
        self._step += 1
        return Path(self._plan.directory) / name / _native.step_directory(self._step)

    def _remove(self, directories: list[Path]) -> None:
        """Removes checkpoints, and waits until whoever comes next pays nothing for it."""
        if not self._team.rank:
            for directory in directories:
                shutil.rmtree(directory, ignore_errors=True)
            quiesce_after(Path(self._plan.directory), len(directories) * self._nbytes)
        self._team.meet()
