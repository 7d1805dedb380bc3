"""One process of a benchmark: ``python -m penstock_bench.suites.io.child``.

It reads a job as a line of JSON, prepares it, says ``"ready"``, reads the moment to begin, and
prints what came of it. Whatever goes wrong is a line with an ``"error"``.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from penstock import _native


def main() -> None:
    """Does what standard input says."""
    # Of file-per-tensor layouts all are open at once.
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    try:
        bench = _native.Bench(sys.stdin.readline())
        _say("ready")
        start_at = float(sys.stdin.readline())
        _say(json.loads(bench.run(start_at)))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _say({"error": str(error)})
        # Nothing of the interpreter is worth waiting for.
        os._exit(1)


def _say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
