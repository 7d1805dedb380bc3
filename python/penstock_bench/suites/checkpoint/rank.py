"""One rank of a benchmark of checkpoints: ``python -m penstock_bench.suites.checkpoint.rank``.

It reads a line of JSON (its number, how many there are, the plan); where there are several, the
first one prints the port that it listens at, and the others read it. The first one also prints what
is measured, line by line. When standard input ends, whoever started it is gone, and so is it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

from penstock_bench.suites.checkpoint.team import Team, hosted_store, store_at

if TYPE_CHECKING:
    from penstock_bench.results.results import Measurement


def main() -> None:
    """Does what standard input says."""
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
