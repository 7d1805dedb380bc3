"""Several processes (`jax.distributed`) that make one checkpoint together.

Each writes the pieces of global arrays that its devices hold, of replicas the first. The first
process also writes what all of them have the same of: plain values, arrays of one process. They
talk through the key-value store of JAX's coordination service, and not by collectives, so that a
wait has an end and nothing is in the way of training:

1. the first one begins an attempt and posts its id;
2. every other one joins, writes, and posts its vote, or its error;
3. the first one compares what all say they have, commits or gives up, and posts that.
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

from penstock import SaveReport
from penstock.checkpoint.loading.foreign import check_no_store
from penstock.checkpoint.saving.rank_save import (
    PartVote,
    RankAttempt,
    absolute,
    check_step,
    decode_path,
    encode_metadata,
    to_native,
)
from penstock.checkpoint.state.flatten import Flattener
from penstock.checkpoint.state.tree import ROOT
from penstock.errors import PenstockError, PenstockWarning, RankError, UnsupportedStateError
from penstock.integrations.jax.trees import to_state

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from penstock import Options
    from penstock.tensors.memory import TensorSource

_ANSWER_SECONDS = 600
"""For how long processes wait for each other where they load."""


class _Rounds:
    """Saves and questions by their numbers, and which of them all processes have left.

    Several may be open: each `Checkpoints` has a save of its own in the background.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._open: set[int] = set()
        self._oldest_of: dict[int, int] = {}
        self._forgotten = 0

    def enter(self) -> int:
        """The next one; every process counts alike."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open.add(number)
            return number

    def leave(self, number: int) -> None:
        """Has this process read no more of it."""
        with self._lock:
            self._open.discard(number)

    def oldest(self) -> int:
        """The first one that this process may still read of."""
        with self._lock:
            return min(self._open, default=self._next)

    def heard(self, process: int, oldest: int) -> None:
        """Takes note of what another process has said last."""
        with self._lock:
            self._oldest_of[process] = max(oldest, self._oldest_of.get(process, 0))

    def over(self) -> range:
        """Those that all have left, each once."""
        with self._lock:
            every = (self._oldest_of.get(process, 0) for process in range(jax.process_count()))
            first, self._forgotten = self._forgotten, max(self._forgotten, min(every))
            return range(first, self._forgotten)


_rounds = _Rounds()


class _Mail:
    """The messages of one save, which every process counts alike.

    Args:
        path: The checkpoint, for messages.
        timeout_seconds: For how long to wait for another process.
    """

    def __init__(self, path: str, timeout_seconds: float) -> None:
        self._path = path
        self._timeout_ms = int(timeout_seconds * 1000)
        self._number = _rounds.enter()

    def post(self, what: str, message: dict[str, Any]) -> None:
        """Posts a message of this process.

        Raises:
            RankError: Nobody takes it, or this process has posted another one.
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
        """Waits for a message of another one.

        Raises:
            RankError: It has failed, or does not come.
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
        """Reads no more of them."""
        _rounds.leave(self._number)

    def forget(self) -> None:
        """Removes the messages that nobody reads any more; on the first process."""
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


class _Part:
    """What this process has of a pytree.

    Attributes:
        tree: The tree of the state; the same in every process.
        sources: What this process writes.
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
            source for source in tensors if is_first or source[7] is not None
        ]
        self.marks = _marks(pytree)


def _marks(pytree: Any) -> dict[str, str]:
    """Digests of what each process has of its own, by the name in the pytree."""
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
            # The order of a set is of each process its own.
            plain = sorted(map(repr, leaf)) if isinstance(leaf, set | frozenset) else leaf
            text = repr(plain).encode("utf-8", "surrogatepass")
        found[name] = blake2b(text, digest_size=8).hexdigest()
    return found


def from_all(path: str, value: Any) -> list[Any]:
    """A plain value of each process, in their order.

    Raises:
        RankError: One of them does not come.
    """
    if jax.process_count() == 1:
        return [value]
    mail = _Mail(path, _ANSWER_SECONDS)
    try:
        mail.post("value", {"value": value})
        return [mail.wait("value", process)["value"] for process in range(jax.process_count())]
    finally:
        mail.leave()


def from_first(path: str, value: Any) -> Any:
    """A plain value of the first process.

    Raises:
        RankError: It does not come.
    """
    return from_all(path, value)[0]


class SaveTogether:
    """One save of several processes: what each has is taken at once, and written by `run`.

    Args:
        path: The checkpoint's directory.
        pytree: What to save.
        overwrite: Whether a complete checkpoint is replaced.
        step: The training step, if any.
        metadata: A note of plain JSON.
        options: How bytes move; None for ``Options()``.
        copies: Whether what is not of JAX may change before it is written.
        after: What the first process does once the checkpoint is durable.

    Raises:
        UnsupportedStateError: A leaf cannot be stored; the message names it. The others hear of it.
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
    ) -> None:
        self.path = absolute(decode_path(path))
        self._options = to_native(options)
        self._note = encode_metadata(metadata)
        self._step = None if step is None else check_step(step)
        self._overwrite, self._after = overwrite, after
        self._mail = _Mail(self.path, self._options["rank_timeout_seconds"])
        try:
            self._part = _Part(pytree, copies=copies)
        except BaseException as error:
            self._give_up(error)
            raise

    def run(self) -> SaveReport:
        """Writes what this process has to write, and sees the save through to its commit.

        Raises:
            CheckpointExistsError: A complete checkpoint is there, or a store.
            RankError: Another process failed, is not there or has another pytree.
            StorageError: The operating system failed an operation.
        """
        began = time.perf_counter()
        try:
            attempt = self._write() if jax.process_index() else self._coordinate()
        except BaseException as error:
            self._give_up(error)
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
        """What any process but the first does."""
        number = jax.process_index()
        attempt = RankAttempt.join(self.path, self._mail.wait("begun", 0)["id"], number)
        vote = attempt.write(number, self._part.sources, self._options)
        tree = _digest(self._part.tree)
        self._mail.post("vote", {"vote": vote, "tree": tree, "marks": self._part.marks})
        self._mail.wait("outcome", 0)
        return attempt

    def _coordinate(self) -> RankAttempt:
        """What the first process does."""
        check_no_store(self.path)
        attempt = RankAttempt.begin(self.path, overwrite=self._overwrite)
        try:
            self._mail.post("begun", {"id": attempt.id})
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
        """Deletes what is not kept; what is saved is saved, whatever becomes of that."""
        if self._after is None:
            return
        try:
            self._after()
        except PenstockError as error:
            message = f"{self.path} is saved, but older steps could not be deleted: {error}"
            warnings.warn(message, PenstockWarning, stacklevel=2)

    def _give_up(self, error: BaseException) -> None:
        """Lets the others know."""
        for what in ("vote",) if jax.process_index() else ("begun", "outcome"):
            # What is posted already stays, and the coordination service may be gone.
            with contextlib.suppress(RankError):
                self._mail.post(what, {"error": str(error)})
        self._mail.leave()


def _compare(path: str, part: _Part, message: dict[str, Any], process: int) -> None:
    """Refuses pytrees that are not the same.

    Raises:
        RankError: They differ.
    """
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
