"""Starts the ranks of a benchmark on this machine, hears the first one, and ends them all.

A rank is this module as a program. It reads a line of JSON (its number, how many there are, the
plan); where there are several, the first one prints the port that it listens at, and the others
read it. The first one also prints what is measured, line by line. When standard input ends, whoever
started it is gone, and so is it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_bench.harness.running import BenchError, interpreter
from penstock_bench.results.results import Measurement
from penstock_bench.suites.checkpoint.team import Team, hosted_store, store_at

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from typing import IO

    from penstock_bench.suites.checkpoint.plan import Plan

_END_SECONDS = 10.0
_GRACE_SECONDS = 2.0
"""Between the death of one rank and the end of the others, which may still say why."""


def spawn(plan: Plan) -> Generator[Measurement | str]:
    """Runs a plan with a process for each of its ranks.

    However it ends, no process is left; who breaks off has to close it.

    Yields:
        Each measurement, and what is about to be done.
    """
    place, ranks = Path(plan.directory), len(plan.ranks)
    logs = [place / f"log-{rank}" for rank in range(ranks)]
    children: list[subprocess.Popen[str]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                children.append(_start(rank, file))
            job = {"rank": rank, "ranks": ranks, "plan": dataclasses.asdict(plan)}
            _tell(children[rank], job)
        for said in _messages(children, logs):
            if isinstance(said, dict) and "port" in said:
                for child in children[1:]:
                    _tell(child, said)
            elif isinstance(said, dict) and "done" in said:
                break
            else:
                yield said if isinstance(said, str) else Measurement(**said)
        for child in children:
            # All is said; who does not come to an end by itself is ended.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_SECONDS)
    finally:
        for child in children:
            _end(child)


def _start(rank: int, log: IO[str]) -> subprocess.Popen[str]:
    # In a session of its own: Ctrl-C is ours to answer, and who ends it ends what it started.
    return subprocess.Popen(
        interpreter("penstock_bench.suites.checkpoint.spawning"),
        stdin=subprocess.PIPE,
        stdout=log if rank else subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )


def _tell(child: subprocess.Popen[str], what: Any) -> None:
    assert child.stdin is not None
    # `_messages` notices the end of a process that is gone.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(what) + "\n")
        child.stdin.flush()


def _messages(children: list[subprocess.Popen[str]], logs: list[Path]) -> Iterator[Any]:
    """Yields the lines of the first rank; raises when any rank dies."""
    stream = children[0].stdout
    assert stream is not None
    pending = b""
    died: list[int] = []
    is_open = True
    give_up_at = math.inf
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
        selector.register(stream, selectors.EVENT_READ, None)
        for rank, child in enumerate(children):
            # Readable when the process has ended: so it is seen in which order they do.
            process = os.pidfd_open(child.pid)
            opened.callback(os.close, process)
            selector.register(process, selectors.EVENT_READ, rank)
        while is_open or len(died) < len(children):
            left = give_up_at - time.monotonic()
            if left <= 0:
                break
            for key, _ in selector.select(None if left == math.inf else left):
                if key.data is not None:
                    children[key.data].wait()
                    died.append(key.data)
                elif data := os.read(key.fd, 1 << 16):
                    *lines, pending = (pending + data).split(b"\n")
                    for line in lines:
                        yield json.loads(line)
                    continue
                else:
                    is_open = False
                selector.unregister(key.fileobj)
                give_up_at = min(give_up_at, time.monotonic() + _GRACE_SECONDS)
    raise BenchError(_why(died, children, logs))


def _why(died: list[int], children: list[subprocess.Popen[str]], logs: list[Path]) -> str:
    """The error of the rank that failed first: those of the others may follow from it."""
    for rank in died:
        code = children[rank].returncode
        if code < 0:
            hint = "; is there too little memory?" if -code == signal.SIGKILL else ""
            return f"rank {rank} was ended by {signal.Signals(-code).name}{hint}"
        if code:
            text = " ".join(logs[rank].read_text(errors="replace").split())
            return f"rank {rank} ended with code {code}: {text[-300:]}"
    return "the ranks ended before they were done"


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def main() -> None:
    """A rank: does what standard input says."""
    # Libraries print what they like; the lines that are read are ours alone.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(what: Any) -> None:
        lines.write(json.dumps(what) + "\n")

    job = json.loads(sys.stdin.readline())
    team = Team(job["rank"], job["ranks"])
    store = None
    if team.ranks > 1:
        if team.rank:
            port = json.loads(sys.stdin.readline())["port"]
            store = store_at("127.0.0.1", port, team.rank, team.ranks)
        else:
            store = hosted_store(team.ranks)
            say({"port": store.port})
    threading.Thread(target=_watch, daemon=True).start()
    if store is not None:
        team.join(store)
    # Importing it takes PyTorch, and the others are to hear the port first.
    from penstock_bench.suites.checkpoint.checkpoint import Rank
    from penstock_bench.suites.checkpoint.plan import Plan

    def emit(what: Measurement | str) -> None:
        say(what if isinstance(what, str) else dataclasses.asdict(what))

    Rank(Plan.from_json(job["plan"]), team, emit).run()
    team.leave()
    say({"done": True})


def _watch() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
