"""`RayRun`: the run of this worker: its directory, and how its workers communicate."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow.fs
import ray.train

from penstock import Saver
from penstock.errors import RankError, UnsupportedPathError
from penstock.integrations.directories import numbered

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTE = "ray"
"""The plug-in's member of a checkpoint's metadata: the metrics of its report."""

_NAME = re.compile(r"penstock-([0-9]{10,19})-([0-9a-f]{8})")


class RayRun:
    """A run as seen by one worker, from the start of its workers to their end.

    ``storage_path`` is the run's in local mode, where Ray does not provide it.

    Attributes:
        root: The run's directory.
        rank: The rank of this worker.
        is_local: Whether this is local mode (``num_workers=0``), without a controller.
        saver: Runs the saves, one after another.
    """

    def __init__(self, storage_path: str | os.PathLike[str] | None) -> None:
        context = ray.train.get_context()
        self.rank: int = context.get_world_rank()
        self._size: int = context.get_world_size()
        self._check_group()
        try:
            storage = context.get_storage()
        except NotImplementedError:
            storage = None
        self.is_local = storage is None
        self._storage_path = storage_path
        if storage is None:
            parent = "~/ray_results" if storage_path is None else os.fspath(storage_path)
            name = context.get_experiment_name() or "run"
            self.root = os.path.join(os.path.abspath(os.path.expanduser(parent)), name)
            os.makedirs(self.root, exist_ok=True)
            self._filesystem: Any = pyarrow.fs.LocalFileSystem()
        else:
            self.root, self._filesystem = storage.experiment_fs_path, storage.storage_filesystem
        if not isinstance(self._filesystem, pyarrow.fs.LocalFileSystem):
            kind = self._filesystem.type_name
            raise UnsupportedPathError(
                f"{self.root}: Ray keeps this run in a storage of type {kind}, and Penstock writes "
                "to file systems: give RunConfig(storage_path=…) a directory that all nodes have "
                "mounted, or report with ray.train.report",
                path=self.root,
                scheme=kind,
            )
        self.saver = Saver(no_dist=self._size == 1)
        self._life: str = self.first(uuid4().hex[:8])

    def check(self, storage_path: str | os.PathLike[str] | None) -> None:
        """Raises `ValueError` if `resume` and `report` are given different storage paths."""
        if not self.is_local or storage_path is None:
            return
        first = self._storage_path
        if first is None or os.fspath(storage_path) != os.fspath(first):
            raise ValueError(
                f"storage_path={storage_path!r}: it was {first!r} in the first call, and "
                f"checkpoints of this run are in {self.root}: give the same to resume and report"
            )

    def _check_group(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        if self._size > 1 and (distributed is None or not distributed.is_initialized()):
            raise RankError(
                f"this is one of {self._size} workers of Ray Train, and torch.distributed has no "
                "process group, by which they save one checkpoint together: use TorchTrainer, or "
                "call torch.distributed.init_process_group first",
                rank=self.rank,
            )

    def path(self, step: int) -> str:
        """The path of a step, unique to the life of these workers.

        After a restart the same step has another name: Ray deletes by name, and a checkpoint
        registered twice would be deleted with its older registration.
        """
        return os.path.join(self.root, f"penstock-{step:010d}-{self._life}")

    def checkpoint(self, path: str) -> ray.train.Checkpoint:
        """Ray's object for a checkpoint."""
        return ray.train.Checkpoint(path, filesystem=self._filesystem)

    def is_own(self, path: str) -> bool:
        """Whether a path is named like a checkpoint of this run."""
        parent, name = os.path.split(path)
        return parent == self.root and _NAME.fullmatch(name) is not None

    def directories(self) -> list[tuple[int, str]]:
        """Step and path of every directory named like a checkpoint, the newest first."""
        found = reversed(numbered(self.root, _NAME))
        return [(step, path) for step, path in found if not path.endswith(f"-{self._life}")]

    def everyone(self, value: Any) -> Sequence[Any]:
        """Each worker's value, in the order of ranks."""
        if self._size == 1:
            return [value]
        values: list[Any] = [None] * self._size
        sys.modules["torch.distributed"].all_gather_object(values, value)
        return values

    def first(self, value: Any) -> Any:
        """The value of the worker of rank 0."""
        return self.everyone(value)[0]


_current: tuple[object, RayRun] | None = None


def current(storage_path: str | os.PathLike[str] | None) -> RayRun:
    """The run of this worker; all workers make the first call together."""
    global _current
    context = ray.train.get_context()
    # In local mode one process may train several times, each with another context.
    key = context if type(context).__name__ == "LocalTrainContext" else RayRun
    if _current is None or _current[0] is not key:
        _current = (key, RayRun(storage_path))
    run = _current[1]
    run.check(storage_path)
    return run
