"""Checks that the plug-in fits the installed Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError
from penstock.integrations.versions import Probe, self_check

if TYPE_CHECKING:
    from penstock.integrations.ray.run import RayRun

_TRIAL = "penstock.integrations.ray.trial"
_TRIAL_SECONDS_MAX = 300


def check() -> None:
    """Raises `MissingDependencyError`, with a list, if Ray lacks parts the plug-in uses."""
    probe = Probe("ray", "penstock.integrations.ray")
    is_enabled: Any = probe.attribute("ray.train.v2._internal.constants", "is_v2_enabled")
    if is_enabled is not None and not is_enabled():
        # The default in Ray 2.50; all later look-ups would fail, too.
        probe.note("Ray Train is its version 1 here: set RAY_TRAIN_V2_ENABLED=1 in the environment")
        probe.check()
    probe.signature(
        probe.attribute("ray.train", "report"),
        "metrics",
        "checkpoint",
        "checkpoint_upload_mode",
        "checkpoint_upload_fn",
        "delete_local_checkpoint_after_upload",
    )
    modes = probe.attribute("ray.train", "CheckpointUploadMode")
    for mode in ("NO_UPLOAD", "ASYNC"):
        probe.attribute(modes, mode)
    for name in ("get_checkpoint", "get_all_reported_checkpoints", "get_context"):
        probe.attribute("ray.train", name)
    probe.signature(probe.attribute("ray.train", "Checkpoint"), "path", "filesystem")
    internal = "ray.train.v2._internal"
    probe.attribute(f"{internal}.constants", "CHECKPOINT_MANAGER_SNAPSHOT_FILENAME")
    for name in ("get_storage", "get_world_rank", "get_world_size", "get_experiment_name"):
        context = probe.attribute("ray.train.v2.api.context", "TrainContext")
        probe.attribute(context, name)
    probe.check()


def try_out(run: RayRun) -> None:
    """Reports and resumes a tiny state, if Ray is newer than the versions tested.

    A worker has one run, and its reports cannot be taken back. So another process runs it, in Ray's
    local mode. All workers call this.
    """
    self_check("ray", lambda: _try_out(run))


def _try_out(run: RayRun) -> None:
    wrong = run.first(_trial() if run.rank == 0 else None)
    if wrong is not None:
        raise StateMismatchError(f"a tiny run was not resumed: {wrong}", path=run.root)


def _trial() -> str | None:
    """Runs the trial; returns the last line of its errors if it failed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as directory:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", _TRIAL, directory],
                env=own | {"RAY_TRAIN_V2_ENABLED": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_TRIAL_SECONDS_MAX,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            # Returned, as the other workers wait for this one's result.
            return str(error)
    if not ended.returncode:
        return None
    return (ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"])[-1]
