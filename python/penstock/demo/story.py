"""The demo in six chapters, each of whose claims is checked before it is printed.

1. A reference run trains to the end and saves nothing.
2. The same program saves every few steps and gets SIGKILL in the middle of a save.
3. Started once more, it resumes from the newest complete checkpoint and trains to the end. Its
   losses and its final weights have to equal the reference's bit for bit.
4. The leftovers of the killed save are swept, and every byte of the store is verified.
5. One bit of a copy is flipped; loading it has to fail and to name the tensor.
6. Sizes, speeds, engine.
"""

from __future__ import annotations

import shutil
import signal
from statistics import median
from typing import TYPE_CHECKING

import penstock
from penstock.common.console import size
from penstock.demo.crash import Kill, SaveKiller
from penstock.demo.narrator import ClaimError, Narrator
from penstock.demo.run import TrainingLog, TrainingProcess

if TYPE_CHECKING:
    from pathlib import Path

OVERHEAD_SECONDS = 20.0
"""Seconds beside training steps: starting PyTorch three times takes 5 to 7 each."""

TRAINED_LENGTHS = 2.1
"""Training steps of all three runs together, in lengths of the reference run."""

SAVES = 12
"""Saves in a run."""

KILL_AFTER = 0.6
"""The share of the training after which the next save is killed."""


class Story:
    """One run of the demo, in a directory of its own.

    Args:
        directory: The store's parent directory; exists and is empty.
        seconds: Approximate duration of the whole demo.
        steps: Training steps; None for as many as fit into ``seconds``.
    """

    def __init__(self, directory: Path, seconds: float, steps: int | None) -> None:
        self._narrator = Narrator()
        self._directory = directory
        self._root = directory / "store"
        self._store = penstock.CheckpointStore(self._root)
        self._training_seconds = max(1.0, (seconds - OVERHEAD_SECONDS) / TRAINED_LENGTHS)
        self._steps = steps

    def run(self) -> None:
        """Runs all chapters.

        Raises:
            ClaimError: A claim does not hold.
            RunError: The training program ended with an error.
        """
        reference = self._train_without_interruption()
        killed, kill = self._kill_in_a_save(reference)
        resumed = self._resume(reference, killed, kill)
        checked = self._sweep_and_verify(kill)
        self._damage_a_copy()
        self._numbers(killed, resumed, checked)

    def _train_without_interruption(self) -> TrainingLog:
        self._narrator.chapter("1  Train without interruption, saving nothing")
        steps = ["--steps", str(self._steps)] if self._steps else []
        run, _ = self._train("reference", [*steps, "--seconds", str(self._training_seconds)])
        first, last = run.loss(1), run.loss(run.steps)
        self._narrator.claim(
            first is not None and last is not None,
            f"{run.steps} steps of a transformer with {run.parameters / 1e6:.2f} million"
            f" parameters on the Python manual: loss {first:.3f} to {last:.3f} nats a byte",
        )
        return run

    def _kill_in_a_save(self, reference: TrainingLog) -> tuple[TrainingLog, Kill]:
        every = _save_every(reference)
        interval = f"every {every} steps" if every > 1 else "every step"
        self._narrator.chapter(
            f"2  Train again, saving {interval}; kill -9 in the middle of a save"
        )
        step_min = int(reference.steps * KILL_AFTER) + 1
        run, kill = self._train("to be killed", self._saving(reference), step_min)
        if kill is None:
            raise ClaimError("no save lasted long enough to be killed before its commit")
        self._narrator.claim(
            run.exit_code == -signal.SIGKILL,
            f"SIGKILL hit while step {kill.step} was being saved: data was there, the manifest"
            " (the commit point) was not",
        )
        self._narrator.files(kill.files)
        states = {info.step: info.state for info in self._store.scan()}
        newest = run.saves[-1]["step"] if run.saves else None
        self._narrator.claim(
            states.get(kill.step) == "incomplete" and newest == self._store.latest() is not None,
            f"the store calls step {kill.step} incomplete; the newest complete step is {newest},"
            " the last that was acknowledged",
        )
        return run, kill

    def _resume(self, reference: TrainingLog, killed: TrainingLog, kill: Kill) -> TrainingLog:
        self._narrator.chapter("3  Start the same program once more")
        run, _ = self._train("resumed", self._saving(reference))
        newest = killed.saves[-1]["step"]
        self._narrator.claim(
            run.loaded is not None and run.loaded["step"] == newest,
            f"it went on by itself from step {newest}",
        )
        self._narrator.losses(
            {"uninterrupted": reference, "killed": killed, "resumed": run},
            (newest, newest + 1, kill.step, kill.step + 1),
        )
        self._narrator.claim(
            killed.losses == {step: reference.losses[step] for step in range(1, kill.step + 1)},
            f"steps 1 to {kill.step}, before the kill: every loss equal bit for bit",
        )
        later = range(newest + 1, reference.steps + 1)
        self._narrator.claim(
            run.losses == {step: reference.losses[step] for step in later},
            f"steps {newest + 1} to {reference.steps}, resumed: every loss equal bit for bit",
        )
        self._narrator.claim(
            run.weights is not None and run.weights == reference.weights,
            f"final weights equal bit for bit: SHA-256 {str(run.weights)[:32]}...",
        )
        return run

    def _sweep_and_verify(self, kill: Kill) -> penstock.reports.VerifyResult:
        self._narrator.chapter("4  Check the store")
        orphans = self._store.sweep()
        left = {name for name, _ in kill.files} & {path.name for path in self._root.rglob("*")}
        swept = f"saving step {kill.step} again removed it"
        if orphans:
            swept = f"sweep removed {size(sum(orphan.bytes for orphan in orphans))}"
        self._narrator.claim(not left, f"nothing is left of the killed save: {swept}")
        steps = self._store.steps()
        results = [self._store.verify(step) for step in steps]
        checked = sum(result.bytes_checked for result in results)
        self._narrator.claim(
            bool(results) and all(result.ok for result in results),
            f"steps {', '.join(map(str, steps))} verified: all of {size(checked)} is as saved",
        )
        self._narrator.say(
            "Kept were the newest three (keep_last=3) and the newest that was once read back whole."
        )
        return results[-1]

    def _damage_a_copy(self) -> None:
        self._narrator.chapter("5  Flip one bit in a copy of the newest checkpoint")
        newest = self._store.path(self._store.steps()[-1])
        copy = self._directory / "damaged-copy"
        shutil.copytree(newest, copy)
        target = max(penstock.inspect(copy).tensors, key=lambda tensor: tensor.bytes)
        _flip_bit(copy / target.file, (target.begin + target.end) // 2)
        try:
            penstock.load(copy)
        except penstock.errors.CorruptCheckpointError as error:
            self._narrator.error(error)
            found = (error.file, error.tensor)
        else:
            raise ClaimError("load noticed the damage")
        self._narrator.claim(
            found == (target.file, target.name),
            f"load handed nothing out, and named the tensor that was hit: {target.name}",
        )
        problems = penstock.verify(copy).problems
        self._narrator.claim(
            target.name in (problem.tensor for problem in problems) and penstock.verify(newest).ok,
            "verify finds it as well; the original is as good as before",
        )

    def _numbers(
        self, killed: TrainingLog, resumed: TrainingLog, checked: penstock.reports.VerifyResult
    ) -> None:
        self._narrator.chapter("6  Numbers")
        saves, loaded = [*killed.saves, *resumed.saves], resumed.loaded
        if loaded is None:
            raise ClaimError("the resumed run reported its load")
        last = saves[-1]
        seconds = median(save["seconds"] for save in saves)
        self._narrator.facts(
            {
                "checkpoint": f"{size(last['bytes'])}, {last['tensors']} tensors",
                "save": f"{_speed(last['bytes'], seconds)}, synced; median of {len(saves)}",
                "load": f"{_speed(loaded['bytes'], loaded['seconds'])}, every byte verified",
                "verify": _speed(checked.bytes_checked, checked.seconds),
                "engine": last["engine"],
                "direct I/O": "yes" if last["direct_io"] else "no",
                "fallbacks": "; ".join(last["fallbacks"]) or "none",
            }
        )
        self._narrator.say(
            "So small a checkpoint shows the fixed cost of a durable save, not the speed of"
            " the device."
        )

    def _train(
        self, label: str, options: list[str], kill_from_step: int | None = None
    ) -> tuple[TrainingLog, Kill | None]:
        """Runs the training program; may kill it in its first save from a step on."""
        kill = None
        with TrainingProcess(options) as training, self._narrator.bar(label) as show:
            if kill_from_step is None:
                run = training.follow(show)
            else:
                killer = SaveKiller(training.process, self._root, kill_from_step)
                killer.start()
                run = training.follow(show)
                kill = killer.end()
        if kill is None:
            training.require_success()
        return run, kill

    def _saving(self, reference: TrainingLog) -> list[str]:
        """Arguments of the run that is killed and of the one that resumes: the same."""
        store = ["--store", str(self._root), "--save-every", str(_save_every(reference))]
        return [*store, "--steps", str(reference.steps)]


def _save_every(reference: TrainingLog) -> int:
    return max(1, reference.steps // SAVES)


def _flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def _speed(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s ({seconds * 1e3:.0f} ms)"
