"""`Saver`: saves checkpoints to any paths one after another, also in the background."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from penstock.checkpoint.loading.path_kind import check_no_store
from penstock.checkpoint.ranks.group import find as find_ranks
from penstock.checkpoint.saving.destination import Destination
from penstock.checkpoint.saving.groups import Groups, read_files
from penstock.checkpoint.saving.pending import save_multi_rank
from penstock.checkpoint.saving.save import save_single
from penstock.checkpoint.saving.save_queue import BackgroundSaver, SaveQueue
from penstock.common.events import observed
from penstock.common.paths import absolute
from penstock.common.tracing import call
from penstock.io.arguments import check_step, decode_path, encode_metadata, to_native

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from torch.distributed import ProcessGroup

    from penstock.checkpoint.ranks.group import Ranks
    from penstock.checkpoint.saving.groups import Files
    from penstock.checkpoint.saving.pending import PendingSave
    from penstock.common.progress import Progress
    from penstock.options import Options
    from penstock.reports import SaveReport


class Saver(BackgroundSaver):
    """Saves to paths that the caller chooses, each durable before the next save begins.

    A `CheckpointStore` names its directories and deletes old ones itself; a framework that does
    both uses a `Saver`. The saver keeps its staging memory from save to save until `close`.

    Args:
        options: How bytes move; None for ``Options()``.
        process_group: The ranks that save together, if `torch.distributed` is initialized; None for
            all ranks. All of them call `save` and `save_async` in the same order.
        no_dist: Save without other ranks.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> root = tempfile.mkdtemp()
        >>> with penstock.Saver() as saver:
        ...     for epoch in range(3):
        ...         pending = saver.save_async(f"{root}/epoch={epoch}", {"w": np.full(3, epoch)})
        >>> penstock.load(f"{root}/epoch=2")["w"]
        array([2, 2, 2])
    """

    def __init__(
        self,
        *,
        options: Options | None = None,
        process_group: ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> None:
        to_native(options)
        self._options = options
        self._process_group = process_group
        self._no_dist = no_dist
        self._save_queue = SaveQueue("the saver")

    def save(
        self,
        path: str | os.PathLike[str] | bytes,
        state: Any,
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        progress: bool | Progress = False,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> SaveReport:
        """Waits for the current save, then saves as `penstock.save` does.

        Raises:
            PenstockError: The error of the last save, if it has not been raised yet, or any error
                of `penstock.save`.
        """
        destination = _destination(path, step, metadata, overwrite, groups, files)
        with call("stall", "save", destination.path):
            return self._save(destination, state, progress)

    @observed("save")
    def _save(self, destination: Destination, state: Any, progress: bool | Progress) -> SaveReport:
        options = to_native(self._options)
        ranks, seconds = self._ranks(), options["rank_timeout_seconds"]
        with self._save_queue.next_round(ranks, destination, "wait", seconds) as (save_round, _):
            if save_round is not None:
                report = save_multi_rank(destination, state, save_round, options, progress)
            else:
                report = save_single(destination, state, options, progress)
        self._save_queue.saved(report)
        return report

    @overload
    def save_async(
        self,
        path: str | os.PathLike[str] | bytes,
        state: Any,
        *,
        lazy: bool = False,
        if_busy: Literal["wait", "error"] = "wait",
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        after: Callable[[], None] | None = None,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> PendingSave: ...
    @overload
    def save_async(
        self,
        path: str | os.PathLike[str] | bytes,
        state: Any,
        *,
        lazy: bool = False,
        if_busy: Literal["skip"],
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        after: Callable[[], None] | None = None,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> PendingSave | None: ...
    def save_async(
        self,
        path: str | os.PathLike[str] | bytes,
        state: Any,
        *,
        lazy: bool = False,
        if_busy: Literal["wait", "skip", "error"] = "wait",
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        after: Callable[[], None] | None = None,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
    ) -> PendingSave | None:
        """Saves a state in the background, as `CheckpointStore.save_async` does.

        Args:
            path: The checkpoint's directory; created if missing, with its parents.
            state: What to save; see `penstock.save`.
            lazy: Whether to copy the state after the call; it must not change before
                `PendingSave.stage`.
            if_busy: Policy while the last save is still running: ``"wait"`` for it, ``"skip"`` this
                save and return None, or raise an ``"error"``. All ranks pass the same policy.
            step: The training step, stored with the state.
            metadata: A note of plain JSON.
            overwrite: Replace a complete checkpoint at the path.
            after: Called in the saving thread once the checkpoint is durable, among many ranks on
                the first only. Use it to delete old checkpoints. Its exceptions are ignored.
            groups: Tensors that readers of models shall find; see `penstock.save`.
            files: Small files stored beside the shards; see `penstock.save`.

        Raises:
            CheckpointExistsError: A complete checkpoint exists and ``overwrite`` is False.
            SaveInProgressError: The last save is still running and ``if_busy`` is ``"error"``.
            RankError: Another rank failed or is missing, or this rank has no process group.
            UnsupportedStateError: A leaf cannot be stored; the message names it.
            PenstockError: The error of the last save, if it has not been raised yet.
        """
        if if_busy not in ("wait", "skip", "error"):
            raise ValueError(f"if_busy={if_busy!r}: must be one of 'wait', 'skip', 'error'")
        destination = _destination(path, step, metadata, overwrite, groups, files)
        with call("stall", "save_async", destination.path):
            return self._save_queue.save_async(
                self._ranks,
                destination,
                state,
                to_native(self._options),
                lazy=lazy,
                if_busy=if_busy,
                after=after or _nothing,
            )

    def _ranks(self) -> Ranks | None:
        return find_ranks(self._process_group, no_dist=self._no_dist, to_save=True)


def _destination(
    path: str | os.PathLike[str] | bytes,
    step: int | None,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    groups: Mapping[str, str] | None,
    files: Files | None,
) -> Destination:
    # The path is made absolute: a later change of the working directory must not move the save.
    where = absolute(decode_path(path))
    check_no_store(where)
    return Destination(
        path=where,
        step=None if step is None else check_step(step),
        metadata=encode_metadata(metadata),
        overwrite=bool(overwrite),
        groups=Groups.check(groups),
        files=read_files(files),
    )


def _nothing() -> None:
    pass
