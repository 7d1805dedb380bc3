"""`load`: loads a pytree from a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock
from penstock.checkpoint.state.tree.select import select
from penstock.integrations.jax.matching import PytreeMatching
from penstock.integrations.jax.trees import with_keys
from penstock.plugin import OpenCheckpoint, Unsealing, decode_path, to_native

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from penstock import Options
    from penstock.integrations.jax.leaves import Leaf
    from penstock.sealing import Identities, Key
    from penstock.signing import SignatureKey, Signers

_BATCH_BYTES_MAX = 1 << 30
"""Bytes read before they go to the devices: an accelerator's arrays stay in host memory."""


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    keys: str | Iterable[str] | None = None,
    options: Options | None = None,
    identities: Identities | Key | Iterable[Key] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> Any:
    """Loads a pytree; every byte it returns was verified against its digest.

    Args:
        path: The checkpoint's directory.
        like: A pytree of the same structure, each leaf of which describes the result:

            - a `jax.Array` or `jax.ShapeDtypeStruct`: an array of that shape and type, with that
              sharding; only parts held by devices of this process are read. The arrays themselves
              are not used, and may be deleted;
            - a `jax.sharding.Sharding`: an array with that sharding, of any shape and type; for a
              container in the checkpoint, every array in it;
            - a `numpy.ndarray`: a NumPy array of that shape and type;
            - anything else: the value that was saved.

            Containers have the types of those of ``like``, such as the `NamedTuple`s of optax.
            None: plain containers, as `penstock.integrations.jax.trees` describes, with NumPy
                arrays.
        keys: Dotted names of the leaves to load, or patterns of `fnmatch` for them, such as
            ``"params.*"``. ``like`` then has only these.
        options: Settings of the I/O; None for ``Options()``.
        identities: Keys that open a sealed checkpoint; see `penstock.load`. A clear one is then
            refused.
        signed_by: Public keys of which one must have signed the checkpoint; see `penstock.load`.

    Raises:
        CheckpointNotFoundError: There is nothing at the path.
        IncompleteCheckpointError: The save there never finished.
        CorruptCheckpointError: The checkpoint is damaged or malformed.
        TamperedError: Somebody without the key has changed a sealed checkpoint.
        SealedError: The checkpoint is sealed, and there are no identities.
        NotSealedError: ``identities`` are given and the checkpoint is clear.
        SignatureError: None of ``signed_by`` has signed the checkpoint.
        StateMismatchError: ``like`` does not fit, or a key matches nothing.
        StorageError: The operating system failed an operation.

    Example:
        >>> import jax, jax.numpy as jnp, tempfile
        >>> from penstock.integrations import jax as pj
        >>> path = tempfile.mkdtemp() + "/ckpt"
        >>> report = pj.save(path, {"w": jnp.arange(3), "step": 7})
        >>> pj.load(path, like={"w": jax.ShapeDtypeStruct((3,), "int32"), "step": 0})
        {'step': 7, 'w': Array([0, 1, 2], dtype=int32)}
        >>> pj.load(path, keys="step")
        {'step': 7}
    """
    if like is None:
        state = penstock.load(
            path, keys=keys, options=options, identities=identities, signed_by=signed_by
        )
        return with_keys(state, decode_path(path))
    settings = to_native(options)
    unsealing = Unsealing.of(identities, signed_by=signed_by)
    opened = OpenCheckpoint(decode_path(path), unsealing=unsealing)
    try:
        with opened.reading():
            opened.view_as(0)
            root = opened.root
            if keys is not None:
                patterns = [keys] if isinstance(keys, str) else list(keys)
                root = select(root, patterns, opened.path)
            matching = PytreeMatching(opened, root, like)
            for batch in _batches(matching.leaves):
                opened.read([one for leaf in batch for one in leaf.reads()], settings)
                for leaf in batch:
                    leaf.finish(opened, settings)
    finally:
        opened.release()
    return matching.build()


def _batches(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Batches of leaves of at most that many bytes, or of one larger leaf."""
    batch: list[Leaf] = []
    nbytes = 0
    for leaf in leaves:
        if batch and nbytes + leaf.nbytes > _BATCH_BYTES_MAX:
            yield batch
            batch, nbytes = [], 0
        batch.append(leaf)
        nbytes += leaf.nbytes
    if batch:
        yield batch
