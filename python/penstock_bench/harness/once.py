"""One process of a benchmark that is given a job, says what came of it, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from typing import Any

from penstock_bench.harness.running import interpreter


def once(module: str, job: dict[str, Any], *, timeout_seconds: float) -> dict[str, Any]:
    """Runs a module, which reads the job from its standard input, and ends what it has started.

    Args:
        module: It prints what came of it, as JSON, in its last line.
        job: What it is to do, for JSON.
        timeout_seconds: For how long.

    Returns:
        What it has printed; ``"error"`` with the reason where there is nothing.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen(
        interpreter(module),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(json.dumps(job), timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout_seconds:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    if child.returncode == 0:
        found: dict[str, Any] = json.loads(out.strip().rpartition("\n")[2])
        return found
    if child.returncode == -signal.SIGKILL:
        return {"error": "ended by the kernel: the memory of its group was not enough"}
    return {"error": f"ended with {child.returncode}: {' '.join(err.split())[-300:]}"}
