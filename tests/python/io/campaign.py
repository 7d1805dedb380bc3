"""A program that runs random transfers, ends each in a random way, and checks the result.

    campaign.py DIRECTORY TRANSFERS SEED

It checks every byte: read data, written files, and memory given back to the caller, which no
transfer may touch any more. It prints the process's resources before and after as JSON.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import threading
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from penstock.errors import TransferCancelledError
from penstock.offload import Buffers, TensorIO

SLOT_BYTES, SLOTS = 96 << 10, 64
FILE_BYTES = SLOT_BYTES * SLOTS
HANG_SECONDS = 60
MARK = 0xA5
"""Fills memory that was given back to the caller."""
MEMORIES_MAX = 200


class Campaign:
    """Runs random transfers, with the expected value of every byte."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.drawn = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.content = np.frombuffer(self.drawn.randbytes(FILE_BYTES), np.uint8)
        self.source, self.sink = directory / "source", directory / "sink"
        self.source.write_bytes(self.content.tobytes())
        self.sink.write_bytes(bytes(FILE_BYTES))
        self.expected = np.zeros(FILE_BYTES, np.uint8)
        """Content of the written file while no transfer is in flight."""
        self.buffers = Buffers(64 << 20)
        self.memories: list[Any] = []
        self.dropped: dict[int, np.ndarray] = {}
        """Expected content of each slot that a dropped transfer writes."""
        self.io = self.made()

    def made(self) -> TensorIO:
        """Returns a `TensorIO` with random settings."""
        return TensorIO(
            extent_bytes=self.drawn.choice([4096, 16384, 1 << 20]),
            queue_depth=self.drawn.choice([1, 4, 32]),
            io_threads=self.drawn.choice([1, 2, 3]),
            engine=self.drawn.choice(["auto", "threads"]),
            direct=self.drawn.choice(["auto", "off"]),
        )

    def memory(self, nbytes: int) -> Any:
        """Returns a tensor or array of bytes: pinned, plain or strided."""
        match self.drawn.randrange(4):
            case 0:
                return self.buffers.empty(nbytes, torch.uint8)
            case 1:
                return torch.empty(2 * nbytes, dtype=torch.uint8)[::2]
            case 2:
                return np.empty(nbytes + 1, np.uint8)[1:]
            case _:
                return torch.empty(nbytes, dtype=torch.uint8)

    def read(self) -> None:
        """Reads at a random place, and ends the transfer in a random way."""
        begin = self.drawn.randrange(FILE_BYTES)
        nbytes = min(FILE_BYTES - begin, self.drawn.randrange(SLOT_BYTES))
        memory = self.memory(nbytes)
        memory[:] = 0
        transfer = self.io.read(memory, self.source, begin)
        wanted = self.content[begin : begin + nbytes]
        how = self.end(transfer)
        found = np.asarray(memory)
        if how == "moved":
            assert np.array_equal(found, wanted), "read wrong bytes"
        elif how == "cancelled":
            assert ((found == wanted) | (found == 0)).all(), "read bytes that nobody stored"
        else:
            return
        self.give_back(memory)

    def write(self) -> None:
        """Writes at a random place, and ends the transfer in a random way."""
        slot = self.drawn.randrange(SLOTS)
        if slot in self.dropped:
            self.settle()
        begin = slot * SLOT_BYTES + self.drawn.choice([0, self.drawn.randrange(SLOT_BYTES)])
        nbytes = self.drawn.randrange((slot + 1) * SLOT_BYTES - begin + 1)
        memory = self.memory(nbytes)
        memory[:] = self.drawn.randrange(256)
        after = self.expected[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES].copy()
        inside = begin - slot * SLOT_BYTES
        after[inside : inside + nbytes] = np.asarray(memory)
        transfer = self.io.write(memory, self.sink, begin, sync=self.drawn.random() < 0.02)
        how = self.end(transfer)
        if how == "dropped":
            # Its memory belongs to the transfer until that ends.
            self.dropped[slot] = after
            return
        self.look(slot, after, is_whole=how == "moved")
        self.give_back(memory)

    def look(self, slot: int, after: np.ndarray, *, is_whole: bool) -> None:
        """Checks a slot after a write: the new bytes, or for each byte the old or the new one."""
        begin = slot * SLOT_BYTES
        found = np.fromfile(self.sink, np.uint8, SLOT_BYTES, offset=begin)
        before = self.expected[begin : begin + SLOT_BYTES]
        if is_whole:
            assert np.array_equal(found, after), "wrote wrong bytes"
        else:
            assert ((found == before) | (found == after)).all(), "wrote bytes that nobody gave"
        self.expected[begin : begin + SLOT_BYTES] = found

    def end(self, transfer: Any) -> str:
        """Ends a transfer in a random way: ``moved``, ``cancelled`` or ``dropped``."""
        way = self.drawn.choice(["wait", "wait", "cancel", "drop", "fork", "await", "give up"])
        way = "wait" if way == "fork" and self.drawn.random() < 0.9 else way
        self.counts[way] += 1
        if way == "drop":
            return "dropped"
        if way == "fork":
            self.fork(transfer)
        elif way == "cancel":
            transfer.cancel()
        try:
            if way == "await":
                report = asyncio.run(awaited(transfer, self.drawn.choice([None, 0.0001])))
            elif way == "give up":
                report = given_up(transfer)
            else:
                report = transfer.result(HANG_SECONDS)
        except TransferCancelledError:
            self.counts["cancelled"] += 1
            return "cancelled"
        assert report.nbytes >= 0
        return "moved"

    def fork(self, transfer: Any) -> None:
        """Forks a child that inherits the transfer, and may read some bytes itself."""
        begin, reads = self.drawn.randrange(FILE_BYTES - 100), self.drawn.random() < 0.5
        child = os.fork()
        if child == 0:
            status = 1
            try:
                if reads:
                    into = bytearray(100)
                    self.io.read(into, self.source, begin).result(HANG_SECONDS)
                    assert into == self.content[begin : begin + 100].tobytes()
                    self.io.close()
                assert not transfer.done()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "a fork went wrong"

    def settle(self) -> None:
        """Waits for all dropped transfers, possibly by closing, and checks their slots."""
        if self.drawn.random() < 0.5:
            self.io.wait(HANG_SECONDS)
        else:
            self.io.close()
            self.io = self.made()
        for slot, after in self.dropped.items():
            self.look(slot, after, is_whole=True)
        self.dropped.clear()

    def give_back(self, memory: Any) -> None:
        """Fills memory whose transfer has ended with `MARK`, to be checked later."""
        memory[:] = MARK
        self.memories.append(memory)
        if len(self.memories) == MEMORIES_MAX:
            self.check_memories()

    def check_memories(self) -> None:
        """Checks that no transfer has touched given-back memory."""
        for memory in self.memories:
            assert (np.asarray(memory) == MARK).all(), "memory was touched after the end"
        self.memories.clear()

    def held(self) -> dict[str, int]:
        """Returns the process's resources while no transfer is in flight."""
        self.settle()
        self.check_memories()
        self.io.close()
        # Event loops and the exceptions of tasks form reference cycles.
        gc.collect()
        held = {
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "resident_bytes": psutil.Process().memory_info().rss,
            "pinned_bytes": self.buffers.used_bytes,
        }
        self.io = self.made()
        return held


async def awaited(transfer: Any, timeout_seconds: float | None) -> Any:
    """Awaits a transfer; after the timeout, which cancels it, returns or raises its outcome."""
    try:
        return await asyncio.wait_for(transfer, timeout_seconds)
    except TimeoutError:
        return transfer.result(HANG_SECONDS)


def given_up(transfer: Any) -> Any:
    """Returns the result of a transfer that another thread cancels meanwhile."""
    thread = threading.Thread(target=transfer.cancel)
    thread.start()
    try:
        return transfer.result(HANG_SECONDS)
    finally:
        thread.join()


def main(directory: Path, transfers: int, seed: int) -> None:
    campaign = Campaign(directory, seed)
    before: dict[str, int] = {}
    for number in range(transfers):
        campaign.drawn.choice([campaign.read, campaign.write])()
        if number == transfers // 4:
            before = campaign.held()
    after = campaign.held()
    campaign.io.close()
    json.dump({"before": before, "after": after, "ways": campaign.counts}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
