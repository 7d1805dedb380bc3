"""The parts of Penstock that plug-ins for frameworks are made of, for those who write one.

`penstock.save`, `penstock.load`, `penstock.Saver` and `penstock.Training` suffice where a framework
hands over a whole state. A framework with a plan of its own takes what is here:

- **Reading**: `is_checkpoint` tells whether a directory is one of Penstock's. `OpenCheckpoint` is a
  checkpoint from which boxes of tensors (`BoxRead` of a `StoredTensor`) go straight into the
  framework's memory, and values are built leaf by leaf.
- **Saving by ranks**: the ranks of `penstock.save` exchange messages of their own. Where those of
  the framework do that, each takes part in a `RankAttempt`, and the coordinator commits the
  `PartVote` of every rank.
- **Pieces**: `Boxes` is a tensor of which a rank gives some pieces. Ranks of `torch.distributed`
  that save together each give theirs, in any kind of save, and need no attempt of their own.
- **Barriers**: where a rank that fails must not leave the others in a collective of the framework,
  the `Barriers` of an operation raise on all ranks.
- **States**: a `Flattener` turns a state into tensors and a tree of `Node`s. A class derived from
  `LiveState` gives its state when a save begins. It replaces `_wanted`, `_targets` and `_restore`
  to say what of a checkpoint is loaded into what, and `_optimizers` for lazy saves.
- **When to save**: a `PacedRun`, given to a saver by `penstock.Saver.record`, keeps the history of
  the saves' times, and says after which steps a save is due, for ``save_every="auto"``.
- **Memory**: `of_array` and `of_tensor` find the `Memory` of an array or a tensor, which is read or
  written without a copy; `to_source` makes it a tensor of a part. A `CopyMemory` takes copies of
  each `Piece` of a state, from where a save writes them.
- **Keys**: `SealingKeys` are the options ``sealing`` and ``identities`` of a plug-in. It gives
  their ``sealing`` to a `penstock.Saver` or a `RankAttempt`, and their ``identities`` to
  `penstock.load` or, as an `Unsealing`, to an `OpenCheckpoint`. In a sealed save by ranks each
  makes a `KeyOffer` and gets a `HandedKey` for it. After errors `AGAINST_KEYS` no older checkpoint
  is tried.
- **Arguments**: `decode_path`, `check_step`, `encode_metadata` and `to_native` check the arguments
  of users, and raise the errors of every other call. `warn` reports a problem of a save that
  continues, and never raises.
- **Files**: `durable` replaces small files so that they survive a power cut; `remove_checkpoint` is
  the one way to delete a checkpoint.

Errors are those of `penstock.errors`. Directories that are named after steps are listed and deleted
by `penstock.integrations.directories`, and `penstock.integrations.versions` checks the framework's
version. Below this module lie modules that may change with any version.

Example:
    Two ranks write half of an array each, and one of them reads a box across both halves.

    >>> import json, tempfile
    >>> import numpy as np, penstock
    >>> from penstock import plugin
    >>> path, options = tempfile.mkdtemp() + "/ckpt", plugin.to_native(None)
    >>> def share(rank):
    ...     half = np.arange(8.0)[4 * rank : 4 * rank + 4]
    ...     walk = plugin.Flattener()
    ...     boxes = plugin.Boxes((8,), half.dtype, [((4 * rank,), half)])
    ...     tree = walk.encode({"w": boxes}, plugin.ROOT, 0)
    ...     tensors, _ = walk.finish()
    ...     return tensors, json.dumps(tree)
    >>> coordinator = plugin.RankAttempt.begin(path, overwrite=False)
    >>> try:
    ...     other = plugin.RankAttempt.join(path, coordinator.id, 1)
    ...     votes = {1: other.write(1, share(1)[0], options)}
    ...     tensors, tree = share(0)
    ...     coordinator.write_shards(0, tensors, options)
    ...     votes[0] = coordinator.write_part(tree)
    ...     coordinator.commit(votes, metadata="{}", overwrite=False)
    ... finally:
    ...     coordinator.abandon()
    >>> penstock.load(path)
    {'w': array([0., 1., 2., 3., 4., 5., 6., 7.])}
    >>> checkpoint = plugin.OpenCheckpoint(path)
    >>> try:
    ...     checkpoint.view_as(0)
    ...     stored = checkpoint.tensor(dict(plugin.branches(checkpoint.root))["w"])
    ...     middle = np.empty(4)
    ...     box = plugin.BoxRead(stored, (2,), plugin.of_array(middle, "w"))
    ...     checkpoint.read([box], options)
    ... finally:
    ...     checkpoint.release()
    False
    >>> middle
    array([2., 3., 4., 5.])
"""

from penstock import _native
from penstock.checkpoint.loading.opened import (
    MANIFEST,
    BoxRead,
    OpenCheckpoint,
    StoredTensor,
    is_of_rank,
)
from penstock.checkpoint.loading.path_kind import (
    check_no_store,
    check_unsealing,
    describe,
    is_checkpoint,
)
from penstock.checkpoint.loading.target import NEW
from penstock.checkpoint.loading.tied import check_model
from penstock.checkpoint.ranks.barriers import Barriers
from penstock.checkpoint.saving.groups import Files, Groups, read_files
from penstock.checkpoint.saving.rank_save import (
    HandedKey,
    KeyOffer,
    PartVote,
    RankAttempt,
    check_in_group,
)
from penstock.checkpoint.state.check import check_stateful, check_storable
from penstock.checkpoint.state.flatten import Flattener, flatten
from penstock.checkpoint.state.tree.scalars import TreeError
from penstock.checkpoint.state.tree.tree import (
    LEVELS_MAX,
    MAPPINGS,
    ROOT,
    SKIPPED,
    Node,
    branches,
    leaves,
    unique_names,
)
from penstock.checkpoint.steps.paced_run import PacedRun
from penstock.checkpoint.view.live import LiveState
from penstock.checkpoint.view.view import View
from penstock.common.paths import absolute
from penstock.common.warn import warn
from penstock.io.files import durable
from penstock.sealing.sealing_keys import AGAINST_KEYS, SealingKeys
from penstock.sealing.unsealing import Unsealing
from penstock.tensors.arguments import (
    check_step,
    decode_local_path,
    decode_path,
    encode_metadata,
    to_native,
)
from penstock.tensors.copies import CopyMemory, Piece
from penstock.tensors.marks import Boxes, Frozen, PerRank
from penstock.tensors.memory import CPU, Memory, of_array, of_tensor, to_source
from penstock.tensors.native_rows import GlobalBox, TensorSource

__all__ = [
    "AGAINST_KEYS",
    "CPU",
    "LEVELS_MAX",
    "MANIFEST",
    "MAPPINGS",
    "NEW",
    "ROOT",
    "SKIPPED",
    "Barriers",
    "BoxRead",
    "Boxes",
    "CopyMemory",
    "Files",
    "Flattener",
    "Frozen",
    "GlobalBox",
    "Groups",
    "HandedKey",
    "KeyOffer",
    "LiveState",
    "Memory",
    "Node",
    "OpenCheckpoint",
    "PacedRun",
    "PartVote",
    "PerRank",
    "Piece",
    "RankAttempt",
    "SealingKeys",
    "StoredTensor",
    "TensorSource",
    "TreeError",
    "Unsealing",
    "View",
    "absolute",
    "branches",
    "check_in_group",
    "check_model",
    "check_no_store",
    "check_stateful",
    "check_step",
    "check_storable",
    "check_unsealing",
    "decode_local_path",
    "decode_path",
    "describe",
    "durable",
    "encode_metadata",
    "flatten",
    "is_checkpoint",
    "is_of_rank",
    "leaves",
    "of_array",
    "of_tensor",
    "read_files",
    "remove_checkpoint",
    "to_native",
    "to_source",
    "unique_names",
    "warn",
]


def remove_checkpoint(path: str, *, force: bool = False, foreign: bool = False) -> int:
    """Removes the directory of a checkpoint and its contents, also other libraries' checkpoints.

    A directory in use by a save or a load is not removed. The manifest is removed first, so a crash
    leaves at most an incomplete checkpoint. A directory without a manifest is removed as well.
    Where other hosts do not see locks (NFS, FUSE) and another save has files in the directory,
    those files stay.

    Checkpoints below the directory are removed too. If one of them is protected or in use, nothing
    is removed.

    Args:
        path: The directory, or a URL of a bucket; not a link.
        force: Whether to remove a protected checkpoint as well.
        foreign: Whether the directory may be another library's checkpoint. If False, a directory
            that is no Penstock checkpoint but contains some, such as a store, is refused.

    Returns:
        The bytes freed.

    Raises:
        CheckpointNotFoundError: The path does not exist.
        ProtectedCheckpointError: The checkpoint is protected, or one below it is.
        StorageError: A save or a load uses the directory or one below it (``errno.EBUSY``), it
            cannot be determined whether one does, the path is refused (``errno.EINVAL``; also one
            that ends in ``.`` or ``..``), or the operating system failed an operation. A repeated
            call continues.
    """
    return _native.remove_checkpoint(path, force=force, foreign=foreign)
