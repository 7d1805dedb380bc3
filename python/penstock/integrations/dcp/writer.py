"""`StorageWriter`: writes a checkpoint for `dcp.save` and `dcp.async_save`.

DCP asks each rank for a plan, shows all plans to the coordinator, lets every rank write, and ends
on the coordinator. Its messages carry Penstock's:

1. the coordinator begins the attempt and puts a *ticket* into the plan of every rank;
2. every rank writes its shards; all but the coordinator also write their part, and cast their vote
   in a *report* that is returned with the results;
3. the coordinator, which alone has all reports, writes its part with the tree of the whole state,
   to which the other parts refer, and commits.

In a sealed save each other rank first puts an *offer* into its own plan, a public key; the ticket
holds the key of the save wrapped for it.

Nothing is visible before the commit. If DCP never gets that far, the coordinator removes its files
when the writer is used again or dropped. Other ranks that have voted cannot know: their files
remain as leftovers, as of a process that died, until the next save to the path or a sweep.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint import state_dict_saver, storage
from torch.distributed.checkpoint.metadata import StorageMeta

from penstock.errors import CannotSealError, UnsupportedStateError
from penstock.integrations.dcp import layout
from penstock.integrations.dcp.packing import check_same, pack, result_of_rank
from penstock.integrations.dcp.paths import is_ours
from penstock.plugin import (
    Groups,
    KeyOffer,
    RankAttempt,
    SealingKeys,
    check_in_group,
    check_no_store,
    decode_path,
    read_files,
    to_native,
    warn,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from penstock.options import Options
    from penstock.plugin import Files, HandedKey, Node, PartVote, TensorSource
    from penstock.sealing import Sealing
    from penstock.signing import SignatureKey, SigningKeys


@dataclass(frozen=True, slots=True)
class _Ticket:
    """The coordinator's message to a rank.

    Attributes:
        attempt_id: The attempt to join.
        number: The rank's number among those that save, and that of its part.
        world_size: The number of ranks that save.
        handed: The key of a sealed save, for a rank that has offered one.
        is_signed: Whether the coordinator signs.
    """

    attempt_id: str
    number: int
    world_size: int
    handed: HandedKey | None = None
    is_signed: bool = False


@dataclass(frozen=True, slots=True)
class _Offer:
    """A rank's message to the coordinator of a sealed save.

    Attributes:
        recipient: The public key for which the coordinator wraps the key of the save.
    """

    recipient: str


@dataclass(frozen=True, slots=True)
class _Report:
    """A rank's message to the coordinator.

    Attributes:
        number: The rank's number.
        vote: The vote for its part; None from the coordinator, which has not written its part yet.
        nodes: The node of each item that it wrote, or wrote a box of.
        raw: Names of values that are the planner's own bytes.
    """

    number: int
    vote: PartVote | None
    nodes: dict[str, Node]
    raw: list[str]


class StorageWriter(storage.StorageWriter):
    """Makes `torch.distributed.checkpoint` save into a Penstock checkpoint.

    One writer may serve any number of saves, one after the other; `dcp.async_save` may send it to
    another process. All ranks have to see the same directory.

    Args:
        path: The checkpoint's directory; created if missing. ``checkpoint_id=`` of `dcp.save`
            replaces it.
        overwrite: Replace a complete checkpoint at the path. The old one can be loaded until the
            new one is committed.
        options: Settings of the I/O; None for ``Options()``.
        groups: As for `penstock.save`: tensors to store in shards of their own, by DCP's names for
            them, under the names of a model. If ranks hold pieces of such a tensor there is no
            index, and a `PenstockWarning` says so.
        files: As for `penstock.save`: small files to store with the checkpoint. They are read here.
        sealing: For whom the checkpoint is sealed; see `penstock.save`. Names, values and planner
            data are sealed as well. A writer that seals is not sent to another process.
        sign: Private keys that sign the checkpoint while it is saved; see `penstock.save`. All
            ranks pass it; the coordinator signs. Such a writer is not sent to another process.
        no_dist: Save alone although a launcher has started several ranks, when `torch.distributed`
            is not initialized. When it is, use ``no_dist=True`` of `dcp.save`.

    Attributes:
        path: The checkpoint's directory.
        overwrite: Whether a complete checkpoint there is replaced.
        save_id: Identifies this save for planners; a new one after each `reset`.

    Raises:
        CheckpointExistsError: A complete checkpoint is there and ``overwrite`` is False; or the
            directory is a store. `dcp.save` raises this and all errors below inside DCP's
            `CheckpointException`.
        UnsupportedStateError: An item cannot be stored; the message names it.
        CannotSealError: With ``sealing``, something would stay clear, or the writer would be sent
            to another process; nothing is written.
        RankError: A rank does not see the directory; or this is one of several ranks without a
            process group, so that each would save over the others.
        StorageError: The operating system failed an operation.
    """

    use_collectives = True
    """As for DCP's writers: the ranks save one checkpoint together."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        options: Options | None = None,
        groups: Mapping[str, str] | None = None,
        files: Files | None = None,
        sealing: Sealing | None = None,
        sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
        no_dist: bool = False,
    ) -> None:
        super().__init__()
        keys = SealingKeys.of(sealing, sign=sign)
        self._sealing, self._signing = keys.sealing, keys.signing
        self.path = decode_path(path)
        self.overwrite = bool(overwrite)
        self._options = to_native(options)
        self._groups, self._files = Groups.check(groups), read_files(files)
        self._no_dist = no_dist
        self.save_id = uuid4().hex
        self._is_coordinator = False
        self._attempt: RankAttempt | None = None
        self._offer: KeyOffer | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._sealing is not None:
            raise CannotSealError(
                f"{self.path}: a writer that seals holds keys, which are not sent to another "
                "process: save with AsyncCheckpointerType.THREAD, or without sealing=",
                path=self.path,
            )
        if self._signing is not None:
            raise UnsupportedStateError(
                f"{self.path}: a writer that signs holds private keys, which are not sent to "
                "another process: save with AsyncCheckpointerType.THREAD, or without sign=",
                key="sign",
            )
        return {**vars(self), "_attempt": None}

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint's directory."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path of the local file system, or a URL of a bucket."""
        return is_ours(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepares for another save, to another path if one is given."""
        if checkpoint_id:
            self.path = decode_path(checkpoint_id)
        self.save_id = uuid4().hex

    def storage_meta(self) -> StorageMeta:
        """The checkpoint's directory and this save's id, for planners."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    # In the order in which DCP calls them.

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begins a save.

        Raises:
            ValueError: ``use_collectives=False`` was given.
            RankError: This is one of several ranks, which have no process group.
        """
        if not self._no_dist:
            check_in_group()
        if not kwargs.get("use_collectives", True):
            raise ValueError(
                "use_collectives=False has every rank save for itself, and a Penstock checkpoint "
                "is one of all ranks: leave it out, or save with no_dist=True to a path of each "
                "rank's own"
            )
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Adds the offer of this rank in a sealed save."""
        self._offer = None
        if self._sealing is None or self._is_coordinator:
            return plan
        self._offer = KeyOffer()
        return dataclasses.replace(plan, storage_data=_Offer(self._offer.recipient))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begins the attempt, with a ticket for every rank; on the coordinator only."""
        if len(plans) > 1 and not all(getattr(plan, "usable", True) for plan in plans):
            raise ValueError(
                "a planner with enable_plan_caching=True keeps from the ranks which attempt they "
                "are to join: make the planner without it"
            )
        self._discard()
        check_no_store(self.path)
        attempt = self._attempt = RankAttempt.begin(
            self.path,
            overwrite=self.overwrite,
            groups=self._groups,
            files=self._files,
            sealing=self._sealing,
            signing=self._signing,
        )
        try:
            tickets = [self._ticket(attempt, number, plans) for number in range(len(plans))]
        except BaseException:
            self._discard()
            raise
        return [
            dataclasses.replace(plan, storage_data=ticket)
            for plan, ticket in zip(plans, tickets, strict=True)
        ]

    def _ticket(self, attempt: RankAttempt, number: int, plans: list[SavePlan]) -> _Ticket:
        """The ticket of a rank, whose offer is in its plan."""
        offer = plans[number].storage_data
        handed = None
        # The first plan is the coordinator's own.
        if number > 0:
            recipient = offer.recipient if isinstance(offer, _Offer) else None
            handed = attempt.handed(recipient, number)
        return _Ticket(attempt.id, number, len(plans), handed, self._signing is not None)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items; returns once they are durable."""
        ticket: _Ticket = plan.storage_data
        try:
            packed = pack(plan, planner, is_alone=ticket.world_size == 1)
            vote = self._write(packed.tensors, ticket)
        except BaseException:
            self._discard()
            raise
        report = _Report(ticket.number, vote, packed.nodes, packed.raw)
        future: Future[list[WriteResult]] = torch.futures.Future()
        future.set_result([result_of_rank(report), *packed.results])
        return future

    def _write(self, tensors: list[TensorSource], ticket: _Ticket) -> PartVote | None:
        if not self._is_coordinator:
            joined = RankAttempt.join(
                self.path,
                ticket.attempt_id,
                ticket.number,
                groups=self._groups,
                offer=self._offer,
                handed=ticket.handed,
                signs=self._signing is not None,
                is_signed=ticket.is_signed,
            )
            return joined.write(ticket.number, tensors, self._options)
        # Not the ticket's attempt: a planner that caches its plans keeps old tickets in them.
        if self._attempt is None:
            raise AssertionError("DCP writes before it has planned")
        self._attempt.write_shards(ticket.number, tensors, self._options)
        return None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits; on the coordinator only."""
        attempt = self._attempt
        if attempt is None:
            raise AssertionError("DCP finishes before it has written")
        try:
            found = (result.storage_data for rank in results for result in rank)
            reports = [report for report in found if isinstance(report, _Report)]
            nodes, raw = _merge(reports)
            tree, note = layout.arrange(nodes, raw, metadata.planner_data, self._further_note())
            own = attempt.write_part(tree)
            votes = {report.number: report.vote or own for report in reports}
            if len(votes) != len(results):
                raise AssertionError(f"{len(votes)} votes of {len(results)} ranks")
            attempt.commit(votes, metadata=note, overwrite=self.overwrite)
            self._warn_fallbacks(attempt)
        finally:
            self._discard()

    def _warn_fallbacks(self, attempt: RankAttempt) -> None:
        """Warns of fallbacks, as DCP has no report to put them in."""
        for one in attempt.written["fallbacks"]:
            if one.kind == "unindexed":
                warn(
                    f"{self.path} is saved, without an index of its model: {one}; "
                    "`penstock export` puts the model together"
                )
            elif one.kind == "renamed":
                warn(f"{self.path} is saved: {one}")

    def _further_note(self) -> Mapping[str, Any]:
        """Additional members of the checkpoint's note."""
        return {}

    def _discard(self) -> None:
        """Removes the coordinator's files unless they are committed."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.abandon()


def _merge(reports: Iterable[_Report]) -> tuple[dict[str, Node], list[str]]:
    """Merges the nodes of all ranks."""
    nodes: dict[str, Node] = {}
    raw: list[str] = []
    owners: dict[str, str] = {}
    for report in reports:
        raw += report.raw
        for name, node in report.nodes.items():
            check_same(name, nodes.setdefault(name, node), node)
            for tensor in _global_names(node):
                owner = owners.setdefault(tensor, name)
                if owner != name:
                    raise UnsupportedStateError(
                        f"{name}: its tensor would have the same name as one of {owner}: rename "
                        "either",
                        key=name,
                    )
    return nodes, raw


def _global_names(node: Node) -> Iterator[str]:
    rest = [node]
    while rest:
        node = rest.pop()
        if type(node) is list:
            rest += node
        elif type(node) is dict:
            if "g" in node and "$" in node:
                yield node["g"]
            rest += node.values()


_COPIES = ("DefaultStager", "_create_cpu_state_dict")
"""Names in the module of `async_save`, from PyTorch 2.9 and 2.7 on, with which it copies itself."""


def _stage(self: object, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of the state on the host."""
    copied: dict[str, Any] = _copied(state_dict, {})
    return copied


def _copied(value: Any, known: dict[int, Any]) -> Any:
    """A copy of a value; a tensor that occurs twice is copied once.

    PyTorch's own functions of these versions do not copy a `DTensor` on the host.
    """
    if isinstance(value, torch.Tensor):
        if id(value) not in known:
            found = value.detach()
            known[id(value)] = found.clone() if found.device.type == "cpu" else found.cpu()
        return known[id(value)]
    if isinstance(value, dict):
        return {key: _copied(child, known) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(child, known) for child in value)
    return copy.deepcopy(value)


def _synchronize_staging(self: object) -> None:
    """Does nothing: `stage` returns when it is done."""


if not any(hasattr(state_dict_saver, name) for name in _COPIES):
    # PyTorch before 2.7: its `async_save` moves tensors to the host, but takes host tensors as they
    # are, so that a save would store later changes by training. A writer that can *stage* is asked
    # to copy instead.
    _kind: Any = StorageWriter
    _kind.stage, _kind.synchronize_staging = _stage, _synchronize_staging
    _kind.should_synchronize_after_execute = _kind._synchronize_after_execute = False
