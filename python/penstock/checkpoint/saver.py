"""`Saver`: checkpoints under any paths, saved one after the other, in the background too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from penstock.checkpoint.loading.foreign import check_no_store
from penstock.checkpoint.ranks.group import find as find_ranks
from penstock.checkpoint.saving.alone import save_alone
from penstock.checkpoint.saving.destination import Destination
from penstock.checkpoint.saving.groups import Groups, read_files
from penstock.checkpoint.saving.save_queue import Turns
from penstock.checkpoint.saving.together import save_together
from penstock.checkpoint.saving.waiting import Waiting
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


class Saver(Waiting):
    """Saves to paths of the caller's, each complete and durable before the next one begins.

    A `CheckpointStore` names its directories itself, and deletes old ones. Frameworks that do both
    have a `Saver`. It keeps the memory for staging from save to save until `close`.

    Args:
        options: How bytes move; None for ``Options()``.
        process_group: The ranks that save together, where `torch.distributed` is initialized; None
            for all. All of them call `save` and `save_async` in the same order.
        no_dist: Save alone, whatever ranks there are.

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
        self._turns = Turns("the saver")

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
        """Waits for the save under way, then saves as `penstock.save` does.

        Raises:
            PenstockError: The error of the last save, if nobody has seen it, or whatever
                `penstock.save` raises.
        """
        destination = _destination(path, step, metadata, overwrite, groups, files)
        with call("stall", "save", destination.path):
            return self._save(destination, state, progress)

    @observed("save")
    def _save(self, destination: Destination, state: Any, progress: bool | Progress) -> SaveReport:
        options = to_native(self._options)
        ranks, seconds = self._ranks(), options["rank_timeout_seconds"]
        with self._turns.together(ranks, destination, "wait", seconds) as (together, _):
            if together is not None:
                report = save_together(destination, state, together, options, progress)
            else:
                report = save_alone(destination, state, options, progress)
        self._turns.saved(report)
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
        """Saves in the background, as `CheckpointStore.save_async` does.

        Args:
            path: The checkpoint's directory; made if missing, its parents too.
            state: What to save; see `penstock.save`.
            lazy: Whether to copy the state later; until `PendingSave.stage` it may not be changed.
            if_busy: What to do while the last save is still running: ``"wait"`` for it, ``"skip"``
                this one and return None, or raise an ``"error"``. Ranks pass the same.
            step: The training step, recorded beside the state.
            metadata: A note of plain JSON.
            overwrite: Replace a complete checkpoint at the path.
            after: Called once the checkpoint is complete and durable, by the thread that saves, of
                many ranks on the first only: here old ones are deleted. What it raises is lost.
            groups: Tensors that readers of models are to find; see `penstock.save`.
            files: Small files that lie beside the shards; see `penstock.save`.

        Raises:
            CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False.
            SaveInProgressError: The last save is still running and ``if_busy`` is ``"error"``.
            RankError: Another rank failed, is not there, or this one has no process group.
            UnsupportedStateError: A leaf cannot be stored; the message names it.
            PenstockError: The error of the last save, if nobody has seen it.
        """
        if if_busy not in ("wait", "skip", "error"):
            raise ValueError(f"if_busy={if_busy!r}: must be one of 'wait', 'skip', 'error'")
        destination = _destination(path, step, metadata, overwrite, groups, files)
        with call("stall", "save_async", destination.path):
            return self._turns.save_async(
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
    # A later change of the working directory moves no save that is under way.
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
