"""Kills and damages runs of examples/resume.py at random, and compares their ends.

    python tests/python/resumed.py --kills 100 --damaged 20 --seed 7

Each process is a fork of one that has imported PyTorch, or two as ranks. SIGKILL comes after a
random number of steps and a random fraction of one, or during the start. Before some restarts the
newest step is damaged: a bit of a file is flipped, or a file is truncated or deleted. A finished
run is compared with an uninterrupted one: model, optimizer, scheduler and position in the data, to
the last bit; then another run begins.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

import forks
import penstock
from ranks import IMPORTS

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

KINDS = {"plain": 1, "ddp": 2, "fsdp2": 2, "offload": 1, "fsdp2-offload": 2}
EVERY = 3
_LIFE_SECONDS_MAX = 120
_STEP_SECONDS = 0.05

_processes = forks.fork_server(IMPORTS)


def example() -> Any:
    """Imports the program as a module."""
    path = Path(__file__).resolve().parents[2] / "examples" / "resume.py"
    spec = importlib.util.spec_from_file_location("example_resume", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Damage(NamedTuple):
    """A damaged file of a step."""

    step: int
    file: str
    how: str


class Life:
    """One start of a run until its end or a kill: a process, or several ranks."""

    def __init__(self, kind: str, directory: Path, steps: int) -> None:
        self._processes = []
        self._pipes: list[Connection] = []
        self.lines: list[str] = []
        size = KINDS[kind]
        self._store = None
        port = None
        if size > 1:
            self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            port = self._store.port
        for rank in range(size):
            here, there = _processes.Pipe(duplex=False)
            arguments = (there, kind, directory, steps, rank, size, port)
            process = _processes.Process(target=_live, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def wait_for(self, events: int) -> bool:
        """Waits for so many events; returns whether they came and the run is still alive."""
        return self._listen(lambda: len(self.lines) >= events)

    def end(self) -> list[str]:
        """Waits for its end; returns its output.

        Raises:
            RuntimeError: The run failed.
        """
        self._listen(lambda: False)
        self.kill()
        if not any(line.startswith("digest") for line in self.lines):
            raise RuntimeError("a life ended too early: " + "\n".join(self.lines[-5:]))
        return self.lines

    def kill(self, chooser: random.Random | None = None) -> None:
        """Kills all ranks, in random order if `chooser` is given."""
        doomed = list(self._processes)
        if chooser is not None:
            chooser.shuffle(doomed)
        for process in doomed:
            process.kill()
            if chooser is not None and chooser.random() < 0.5:
                # The other ranks may notice, or not.
                time.sleep(chooser.uniform(0, _STEP_SECONDS))
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()

    def _listen(self, is_enough: Any) -> bool:
        deadline = time.monotonic() + _LIFE_SECONDS_MAX
        first = self._pipes[0]
        while not is_enough():
            if not first.poll(max(deadline - time.monotonic(), 0)):
                raise RuntimeError("a life hangs")
            try:
                line = first.recv()
            except EOFError:
                return False
            self.lines.append(line)
            if line.startswith("failed"):
                raise RuntimeError(line)
        return True


def _live(
    pipe: Connection, kind: str, directory: Path, steps: int, rank: int, size: int, port: int
) -> None:
    """Runs one process."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    program = example()
    # The campaign counts every step.
    program.tell = lambda text: pipe.send(text) if rank == 0 else None
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            if size > 1:
                store = dist.TCPStore("127.0.0.1", port, size, False, timedelta(seconds=60))
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            offload = f"{directory}-moments" if kind.endswith("offload") else None
            training = program.begin(steps, shard=kind.startswith("fsdp2"), offload=offload)
            arguments = argparse.Namespace(steps=steps, every=EVERY)
            with penstock.CheckpointStore(directory, keep_last=4) as checkpoints:
                if not program.train(checkpoints, training, arguments):
                    raise RuntimeError("it was preempted by nobody")
            digest = program.digest(training)
        passed_over = sum("passed over" in str(one.message) for one in told)
        program.tell(f"passed over {passed_over}")
        program.tell(f"digest {digest}")
        if size > 1:
            time.sleep(0.1)
    except Exception:
        if rank == 0:
            pipe.send(f"failed: {traceback.format_exc()}")
    finally:
        pipe.close()
        # Skips the cleanup that belongs to the fork server.
        os._exit(0)


def damage(directory: Path, chooser: random.Random) -> Damage | None:
    """Damages the newest good step; None if there is no other to fall back to."""
    store = penstock.CheckpointStore(directory, no_dist=True)
    good = [step for step in store.steps() if penstock.verify(store.path(step)).ok]
    if len(good) < 2:
        # Without a good step the run has to raise, which other tests check.
        return None
    step = good[-1]
    files = sorted(path for path in Path(store.path(step)).iterdir() if path.is_file())
    path = chooser.choice(files)
    how = chooser.choice(["flipped", "flipped", "cut", "gone"])
    if how == "gone":
        path.unlink()
    elif how == "cut":
        os.truncate(path, chooser.randrange(path.stat().st_size))
    else:
        data = bytearray(path.read_bytes())
        data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)
        path.write_bytes(data)
    return Damage(step, path.name.partition(".")[0].rstrip("0123456789-"), how)


class Campaign:
    """Numbers of kills and damages, and their results."""

    def __init__(self, kind: str, root: Path, steps: int, chooser: random.Random) -> None:
        self._kind = kind
        self._root = root
        self._steps = steps
        self._chooser = chooser
        self.kills = self.runs = 0
        self.damages: list[Damage] = []
        self.resumed: Counter[str] = Counter()
        self.straight = self._digest(Life(kind, root / "straight", steps).end())

    def run(self, kills: int, damaged: int) -> None:
        """Kills so often, damages a step before some of the restarts, and finishes the run."""
        directory = self._root / f"run-{self.runs}"
        is_damaged = [index < damaged for index in range(kills)]
        self._chooser.shuffle(is_damaged)
        events_min = 0
        while self.kills < kills:
            life = Life(self._kind, directory, self._steps)
            # At most nearly half of a whole run, so that the run ends some day; or at the start.
            # Some runs reach the next save, however slow the machine is.
            events_max = max(self._steps // 4, 2 * EVERY)
            events = self._chooser.randrange(events_min, events_max + events_min)
            if not life.wait_for(events):
                directory = self._finished(life, directory)
                continue
            time.sleep(self._chooser.uniform(0, _STEP_SECONDS))
            life.kill(self._chooser)
            self._note(life)
            if is_damaged[self.kills]:
                done = damage(directory, self._chooser)
                if done is None:
                    # First lets a run reach the next save.
                    events_min = EVERY + 2
                    continue
                self.damages.append(done)
                events_min = 0
            self.kills += 1
            if self.kills % 10 == 0:
                sys.stderr.write(f"{self}\n")
        self._finished(Life(self._kind, directory, self._steps), directory)

    def _finished(self, life: Life, directory: Path) -> Path:
        """Compares a finished run; returns the directory of the next one."""
        found = self._digest(life.end())
        self._note(life)
        if found != self.straight:
            raise AssertionError(f"{directory} ended with {found}, not {self.straight}")
        shutil.rmtree(directory)
        shutil.rmtree(f"{directory}-moments", ignore_errors=True)
        self.runs += 1
        return self._root / f"run-{self.runs}"

    def _note(self, life: Life) -> None:
        how = life.lines[0] if life.lines else "killed before it began"
        self.resumed["resumed" if how.startswith("resumed") else how] += 1

    def _digest(self, lines: list[str]) -> str:
        return lines[-1].removeprefix("digest ")

    def __str__(self) -> str:
        kinds = Counter(f"{one.how} {one.file}" for one in self.damages)
        return (
            f"{self._kind}: {self.kills} kills, {len(self.damages)} of them with damage "
            f"({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}), "
            f"{self.runs} runs ended bit-equal; lives: "
            f"{', '.join(f'{count} {how}' for how, count in sorted(self.resumed.items()))}"
        )


def main() -> None:
    """Runs one campaign for each kind of run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--damaged", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    arguments = parser.parse_args()
    sys.stdout.write(f"seed {arguments.seed}\n")
    for kind in arguments.kinds:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as root:
            chooser = random.Random(f"{arguments.seed} {kind}")
            campaign = Campaign(kind, Path(root), arguments.steps, chooser)
            campaign.run(arguments.kills, arguments.damaged)
        sys.stdout.write(f"{campaign} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()


if __name__ == "__main__":
    # By its module name, under which the fork server's processes import it.
    import resumed

    resumed.main()
