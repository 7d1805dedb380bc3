"""Several processes (`jax.distributed`) that save one checkpoint together.

Each process writes the pieces of global arrays that its devices hold; of replicas it writes the
first. The first process also writes values that are the same in all: plain values, and arrays of
one process. The processes talk through the key-value store of JAX's coordination service rather
than by collectives, so that waits end and training is not disturbed:

1. the first one begins an attempt and posts its id;
2. every other one joins, writes, and posts its vote or its error;
3. the first one compares all votes, commits or gives up, and posts the outcome.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import warnings
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.distributed import global_state

from penstock.errors import PenstockError, PenstockWarning, RankError, UnsupportedStateError
from penstock.integrations.jax.trees import to_state
from penstock.plugin import (
    ROOT,
    Flattener,
    HandedKey,
    KeyOffer,
    PartVote,
    RankAttempt,
    SealingKeys,
    absolute,
    check_no_store,
    check_step,
    decode_path,
    encode_metadata,
    to_native,
)
from penstock.reports import SaveReport

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from penstock import Options
    from penstock.plugin import TensorSource

_ANSWER_SECONDS = 600
"""Seconds that processes wait for each other during a load."""


class _Rounds:
    """Numbers saves and queries, and tracks which of them all processes have left.

    Several may be open: each `Checkpoints` has its own background save.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()
        self._oldest_of: dict[int, int] = {}
        self._forgotten = 0

    def enter(self) -> int:
        """The next number; every process counts alike."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open.add(number)
            return number

    def leave(self, number: int) -> None:
        """Records that this process reads no more messages of it."""
        with self._lock:
            self._open.discard(number)

    def oldest(self) -> int:
        """The oldest number of which this process may still read messages."""
        with self._lock:
            return min(self._open, default=self._next)

    def heard(self, process: int, oldest: int) -> None:
        """Records another process's oldest number, from its latest message."""
        with self._lock:
            self._oldest_of[process] = max(oldest, self._oldest_of.get(process, 0))

    def over(self) -> range:
        """Numbers that all processes have left, each returned once."""
        with self._lock:
            every = (self._oldest_of.get(process, 0) for process in range(jax.process_count()))
            first, self._forgotten = self._forgotten, max(self._forgotten, min(every))
            return range(first, self._forgotten)


_rounds = _Rounds()


class _SaveMessages:
    """The messages of one save, which has the same number in every process.

    Args:
        path: The checkpoint, for error messages.
        timeout_seconds: Seconds to wait for another process.
    """

    def __init__(self, path: str, timeout_seconds: float) -> None:
        self._path = path
        self._timeout_ms = int(timeout_seconds * 1000)
        self._number = _rounds.enter()

    def post(self, what: str, message: dict[str, Any]) -> None:
        """Posts a message of this process.

        Raises:
            RankError: The service does not take it, or this process has posted it before.
        """
        key = f"{self._prefix(self._number)}{what}/{jax.process_index()}"
        text = json.dumps({**message, "oldest": _rounds.oldest()})
        try:
            self._client().key_value_set_bytes(key, text.encode())
        except jax.errors.JaxRuntimeError as error:
            raise RankError(
                f"{self._path}: the coordination service of JAX takes no messages ({error}): call "
                "jax.distributed.shutdown after the last save",
                rank=jax.process_index(),
            ) from None

    def wait(self, what: str, process: int) -> dict[str, Any]:
        """Waits for a message of another process.

        Raises:
            RankError: That process has failed, or posts nothing in time.
        """
        key = f"{self._prefix(self._number)}{what}/{process}"
        try:
            text = self._client().blocking_key_value_get_bytes(key, self._timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            raise RankError(
                f"{self._path}: process {process} has not come within "
                f"{self._timeout_ms / 1000:g} s, or is gone: all processes have to call the "
                f"same; nothing was committed ({error})",
                rank=process,
            ) from None
        message: dict[str, Any] = json.loads(text)
        _rounds.heard(process, message["oldest"])
        if "error" in message:
            raise RankError(
                f"{self._path}: process {process} failed, and nothing was committed: "
                f"{message['error']}",
                rank=process,
            )
        return message

    def leave(self) -> None:
        """Records that this process reads no more messages."""
        _rounds.leave(self._number)

    def forget(self) -> None:
        """Removes messages that no process reads any more; on the first process."""
        _rounds.heard(jax.process_index(), _rounds.oldest())
        for number in _rounds.over():
            self._client().key_value_delete(self._prefix(number))

    def _client(self) -> Any:
        if global_state.client is None:
            raise RankError(
                f"{self._path}: jax.distributed was shut down, by which the processes talk: save "
                "before that",
                rank=jax.process_index(),
            )
        return global_state.client

    @staticmethod
    def _prefix(number: int) -> str:
        return f"penstock/jax/{number}/"


class _ProcessPart:
    """This process's part of a pytree.

    Attributes:
        tree: The tree of the state; the same in every process.
        sources: The tensors that this process writes.
        marks: A digest of every leaf that each process has whole, by name.
    """

    def __init__(self, pytree: Any, *, copies: bool) -> None:
        walk = Flattener()
        root = walk.encode(to_state(pytree, copies=copies, is_shared=True), ROOT, 0)
        tensors, aliases = walk.finish()
        if aliases:
            raise UnsupportedStateError(
                f"{aliases[0][0]}: of several processes only arrays can be stored twice: leave "
                "this one out, or make it an array of NumPy or JAX",
                key=aliases[0][0],
            )
        self.tree = json.dumps(root, ensure_ascii=False, check_circular=False)
        is_first = jax.process_index() == 0
        self.sources: list[TensorSource] = [
            source for source in tensors if is_first or source.box is not None
        ]
        self.marks = _marks(pytree)


def _marks(pytree: Any) -> dict[str, str]:
    """Digests of leaves that each process has whole, by their names in the pytree."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(pytree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if isinstance(leaf, jax.Array):
            if not leaf.is_fully_addressable:
                continue
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            leaf = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        if isinstance(leaf, np.ndarray):
            text = f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes()
        else:
            # Each process may iterate over a set in another order.
            plain = sorted(map(repr, leaf)) if isinstance(leaf, set | frozenset) else leaf
            text = repr(plain).encode("utf-8", "surrogatepass")
        found[name] = blake2b(text, digest_size=8).hexdigest()
    return found


def from_all(path: str, value: Any) -> list[Any]:
    """Returns a plain value of every process, in their order.

    Raises:
        RankError: A process does not answer.
    """
    if jax.process_count() == 1:
        return [value]
    mail = _SaveMessages(path, _ANSWER_SECONDS)
    try:
        mail.post("value", {"value": value})
        return [mail.wait("value", process)["value"] for process in range(jax.process_count())]
    finally:
        mail.leave()


def from_first(path: str, value: Any) -> Any:
    """Returns a plain value of the first process.

    Raises:
        RankError: A process does not answer.
    """
    return from_all(path, value)[0]


class MultiProcessSave:
    """One save of several processes: captures the pytree at once, and writes it in `run`.

    Args:
        path: The checkpoint's directory.
        pytree: The pytree to save.
        overwrite: Whether a complete checkpoint is replaced.
        step: The training step, if any.
        metadata: Plain JSON to store with it.
        options: Settings of the I/O; None for ``Options()``.
        copies: Whether leaves that are not JAX's are copied, as they may change before the write.
        after: Called on the first process once the checkpoint is durable.
        keys: The keys that seal and sign.

    Raises:
        UnsupportedStateError: A leaf cannot be stored; the message names it. Other processes get
            the error, too.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        pytree: Any,
        *,
        overwrite: bool,
        step: int | None,
        metadata: Mapping[str, Any] | None,
        options: Options | None = None,
        copies: bool = False,
        after: Callable[[], object] | None = None,
        keys: SealingKeys,
    ) -> None:
        self._sealing, self._signing = keys.sealing, keys.signing
        self.path = absolute(decode_path(path))
        self._options = to_native(options)
        self._note = encode_metadata(metadata)
        self._step = None if step is None else check_step(step)
        self._overwrite, self._after = overwrite, after
        self._mail = _SaveMessages(self.path, self._options["rank_timeout_seconds"])
        try:
            self._part = _ProcessPart(pytree, copies=copies)
        except BaseException as error:
            self._abort(error)
            raise

    def run(self) -> SaveReport:
        """Writes this process's part, and waits for the commit.

        Raises:
            CheckpointExistsError: A complete checkpoint is there, or a store.
            RankError: Another process failed, is missing or has another pytree.
            StorageError: The operating system failed an operation.
        """
        began = time.perf_counter()
        try:
            attempt = self._write() if jax.process_index() else self._coordinate()
        except BaseException as error:
            self._abort(error)
            raise
        self._mail.leave()
        changes = {
            "path": self.path,
            "step": self._step,
            "checkpoint_id": attempt.id,
            "seconds": time.perf_counter() - began,
            "rank": jax.process_index(),
            "world_size": jax.process_count(),
        }
        return SaveReport(**{**attempt.written, **changes})

    def _write(self) -> RankAttempt:
        """The save on all processes but the first."""
        number = jax.process_index()
        begun = self._mail.wait("begun", 0)
        offer = None if self._sealing is None else KeyOffer()
        handed = None
        if begun["is_sealed"]:
            # Also by a process that does not seal, which is then told so.
            self._mail.post("offer", {"recipient": None if offer is None else offer.recipient})
            handed = self._mail.wait(f"key-{number}", 0)["handed"]
        attempt = RankAttempt.join(
            self.path,
            begun["id"],
            number,
            offer=offer,
            handed=None if handed is None else HandedKey(*handed),
            signs=self._signing is not None,
            is_signed=begun["is_signed"],
        )
        vote = attempt.write(number, self._part.sources, self._options)
        tree = _digest(self._part.tree)
        self._mail.post("vote", {"vote": vote, "tree": tree, "marks": self._part.marks})
        self._mail.wait("outcome", 0)
        return attempt

    def _coordinate(self) -> RankAttempt:
        """The save on the first process."""
        check_no_store(self.path)
        attempt = RankAttempt.begin(
            self.path,
            overwrite=self._overwrite,
            sealing=self._sealing,
            signing=self._signing,
        )
        try:
            is_sealed = self._sealing is not None
            is_signed = self._signing is not None
            begun = {"id": attempt.id, "is_sealed": is_sealed, "is_signed": is_signed}
            self._mail.post("begun", begun)
            for process in range(1, jax.process_count() if is_sealed else 1):
                recipient = self._mail.wait("offer", process)["recipient"]
                handed = attempt.handed(recipient, process)
                self._mail.post(f"key-{process}", {"handed": handed})
            attempt.write_shards(0, self._part.sources, self._options)
            votes = {0: attempt.write_part(self._part.tree)}
            for process in range(1, jax.process_count()):
                message = self._mail.wait("vote", process)
                _compare(self.path, self._part, message, process)
                votes[process] = PartVote(*message["vote"])
            self._mail.forget()
            attempt.commit(votes, metadata=self._note, overwrite=self._overwrite, step=self._step)
        finally:
            attempt.abandon()
        self._mail.post("outcome", {})
        self._finish()
        return attempt

    def _finish(self) -> None:
        """Deletes old steps; a failure is a warning, as the checkpoint is saved."""
        if self._after is None:
            return
        try:
            self._after()
        except PenstockError as error:
            message = f"{self.path} is saved, but older steps could not be deleted: {error}"
            warnings.warn(message, PenstockWarning, stacklevel=2)

    def _abort(self, error: BaseException) -> None:
        """Posts an error to the other processes."""
        keys = [f"key-{process}" for process in range(1, jax.process_count())]
        for what in ("offer", "vote") if jax.process_index() else ("begun", *keys, "outcome"):
            # A message posted already stays, and the coordination service may be gone.
            with contextlib.suppress(RankError):
                self._mail.post(what, {"error": str(error)})
        self._mail.leave()


def _compare(path: str, part: _ProcessPart, message: dict[str, Any], process: int) -> None:
    """Raises `RankError` if another process has another pytree."""
    theirs = message["marks"]
    for name in sorted(part.marks.keys() | theirs.keys()):
        if part.marks.get(name) != theirs.get(name):
            raise RankError(
                f"{path}: {name} is not the same in processes 0 and {process}: what is no global "
                "array has to be; make it one with jax.make_array_from_process_local_data, or "
                "leave it out; nothing was committed",
                rank=process,
            )
    if message["tree"] != _digest(part.tree):
        raise RankError(
            f"{path}: processes 0 and {process} save pytrees of other structure, or arrays of "
            "other shapes or types; nothing was committed",
            rank=process,
        )


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
