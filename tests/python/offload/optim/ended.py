"""A training with its optimizer in files, ended at random: are its files those of one step?

    PYTHONPATH=tests/python python -m offload.optim.ended --kills 500 --seed 7
    PYTHONPATH=tests/python python -m offload.optim.ended --cuts 500 --file-system xfs

Each process recovers the state of the previous one, sends its step and digest, and trains on. It is
killed between two steps or within one, or its disk's power is cut. The next one has to find the
last finished step, or the one under way, to the last bit. Each process is a fork of one that has
imported PyTorch.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import forks
import penstock
from offload.optim.training_of import in_memory, parameters, set_gradients
from penstock import offload

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

SHAPES = ((700, 1000), (17,), (64, 64), (5,))
MEMORY_BYTES = 16 << 20
_STEPS_MAX = 12
"""Steps of a process, which is ended earlier or after the last one."""
_LIFE_SECONDS_MAX = 120
_SHUTDOWN = 0x8004587D
"""`EXT4_IOC_SHUTDOWN` and `XFS_IOC_GOINGDOWN`."""
_NO_FLUSH = 2
_KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32

_processes = forks.fork_server(["torch", "torch.distributed.tensor", "torch._dynamo"])


def digest(ours: list[Any], state: dict[str, Any]) -> str:
    """Returns the digest of parameters and all their state."""
    found = hashlib.sha256()
    values = [*ours]
    for number in sorted(state):
        values += [in_memory(state[number][name]) for name in sorted(state[number])]
    for value in values:
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Straight:
    """The digests of an uninterrupted run in memory.

    Args:
        shapes: Shapes of its parameters.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]] = SHAPES) -> None:
        self.shapes = shapes
        self._ours = parameters(torch.bfloat16, shapes)
        self._masters = [torch.nn.Parameter(one.detach().float()) for one in self._ours]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True)
        self._digests = [digest(self._ours, {})]

    def after(self, steps: int) -> str:
        """Returns the digest after so many steps."""
        while len(self._digests) <= steps:
            set_gradients(len(self._digests) - 1, self._ours)
            for one, master in zip(self._ours, self._masters, strict=True):
                master.grad = one.grad.float()
            self._optimizer.step()
            with torch.no_grad():
                for one, master in zip(self._ours, self._masters, strict=True):
                    one.copy_(master)
            state = self._optimizer.state_dict()["state"]
            for number, master in enumerate(self._masters):
                state[number] = {**state[number], "master": master}
            self._digests.append(digest(self._ours, state))
        return self._digests[steps]


def _live(pipe: Connection, directory: Path, is_sealed: bool) -> None:
    """Runs one process of the campaign."""
    try:
        torch.set_num_threads(1)
        ours = parameters(torch.bfloat16, SHAPES)
        optimizer = offload.AdamW(
            ours,
            directory=directory,
            memory_bytes=MEMORY_BYTES,
            masters=True,
            sealing=penstock.Sealing([_KEY]) if is_sealed else None,
            identities=[_KEY] if is_sealed else None,
        )
        optimizer.recover()
        state = optimizer.state_dict()["state"]
        steps = int(state[0]["step"]) if state else 0
        pipe.send((steps, digest(ours, state)))
        del state
        for step in range(steps, steps + _STEPS_MAX):
            set_gradients(step, ours)
            optimizer.step()
            pipe.send(step + 1)
    except Exception:
        pipe.send(f"failed: {traceback.format_exc()}")
    finally:
        pipe.close()
        # Skips the cleanup that belongs to the fork server.
        os._exit(0)


class Campaign:
    """Processes, one after the other, and their results."""

    def __init__(self, chooser: random.Random, *, is_sealed: bool = False) -> None:
        self._chooser = chooser
        self._is_sealed = is_sealed
        self._straight = Straight()
        self.acknowledged = 0
        self.found: Counter[str] = Counter()

    def live(self, directory: Path, end: Any) -> None:
        """Runs one process, and ends it by a call."""
        here, there = _processes.Pipe(duplex=False)
        process = _processes.Process(
            target=_live, args=(there, directory, self._is_sealed), daemon=True
        )
        process.start()
        there.close()
        try:
            steps, found = self._heard(here)
            self._check(steps, found)
            for _ in range(self._chooser.randrange(0, 4)):
                self.acknowledged = self._heard(here)
            time.sleep(self._chooser.uniform(0, 0.03))
            end(process)
            # Steps that it reported before its end are finished.
            with contextlib.suppress(EOFError, _FailedError):
                while True:
                    self.acknowledged = self._heard(here)
        finally:
            process.kill()
            process.join()
            here.close()

    def _heard(self, pipe: Connection) -> Any:
        if not pipe.poll(_LIFE_SECONDS_MAX):
            raise RuntimeError("a life hangs")
        said = pipe.recv()
        if isinstance(said, str):
            raise _FailedError(said)
        return said

    def _check(self, steps: int, found: str) -> None:
        if steps not in (self.acknowledged, self.acknowledged + 1):
            raise AssertionError(f"found step {steps}, acknowledged {self.acknowledged}")
        if found != self._straight.after(steps):
            raise AssertionError(f"what was found is not step {steps}")
        self.found["the one under way" if steps > self.acknowledged else "the last one"] += 1
        self.acknowledged = steps

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.found.items()))
        return f"{self.found.total()} states found, each of one step: {kinds}"


class _FailedError(Exception):
    """A process that failed, as expected once its disk is cut."""


def kills(count: int, chooser: random.Random, *, is_sealed: bool = False) -> Campaign:
    """Runs processes that are killed."""
    campaign = Campaign(chooser, is_sealed=is_sealed)
    with tempfile.TemporaryDirectory() as root:
        for _ in range(count + 1):
            campaign.live(Path(root) / "state", lambda process: process.kill())
    return campaign


def cuts(count: int, chooser: random.Random, kind: str, *, is_sealed: bool = False) -> Campaign:
    """Runs processes whose disk loses its power."""
    campaign = Campaign(chooser, is_sealed=is_sealed)
    with tempfile.TemporaryDirectory() as root:
        image, disk = Path(root) / "image", Path(root) / "disk"
        image.touch()
        os.truncate(image, 512 << 20)
        disk.mkdir()
        _run(f"mkfs.{kind}", "-q", image)
        for _ in range(count + 1):
            with _mounted(image, disk):
                campaign.live(disk / "state", lambda _: _cut(disk))
    return campaign


@contextlib.contextmanager
def _mounted(image: Path, disk: Path) -> Iterator[None]:
    _run("mount", "-o", "loop", image, disk)
    try:
        yield
    finally:
        # A closed ring may keep its files open for a moment.
        for _ in range(500):
            if subprocess.run(["umount", disk], capture_output=True, check=False).returncode == 0:
                break
            time.sleep(0.01)
        else:
            raise RuntimeError("the disk cannot be unmounted")


def _cut(disk: Path) -> None:
    # Never shut down another file system.
    if disk.stat().st_dev == disk.parent.stat().st_dev:
        raise AssertionError("the disk is not mounted")
    descriptor = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, struct.pack("I", _NO_FLUSH))
    finally:
        os.close(descriptor)


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


def main() -> None:
    """Runs one campaign."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--file-system", default="ext4", choices=["ext4", "xfs"])
    parser.add_argument("--sealed", action="store_true")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    sys.stdout.write(f"seed {arguments.seed}\n")
    chooser = random.Random(arguments.seed)
    began = time.monotonic()
    if arguments.kills:
        campaign = kills(arguments.kills, chooser, is_sealed=arguments.sealed)
        sys.stdout.write(f"{arguments.kills} kills: {campaign}\n")
    if arguments.cuts:
        campaign = cuts(arguments.cuts, chooser, arguments.file_system, is_sealed=arguments.sealed)
        sys.stdout.write(f"{arguments.cuts} cuts of {arguments.file_system}: {campaign}\n")
    sys.stdout.write(f"{time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    # By its module name, under which the fork server's processes import it.
    from offload.optim import ended

    ended.main()
