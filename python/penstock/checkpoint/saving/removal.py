"""`remove_checkpoint`: the directory of a checkpoint goes as a step of a store does."""

from __future__ import annotations

from penstock import _native


def remove_checkpoint(path: str, *, force: bool = False, foreign: bool = False) -> int:
    """Removes the directory of a checkpoint with all that is in it, of frameworks too.

    Not from under a save or a load that is under way in it. Its manifest goes first, so a crash
    leaves an incomplete checkpoint at most. A directory without a manifest goes as well. Where
    other hosts do not see locks (NFS, FUSE) and another save has files in it, what belongs to that
    stays.

    Checkpoints below the directory go with it. If one of them is protected or at work, nothing is
    removed.

    Args:
        path: The directory, or a URL of a bucket; no link to one.
        force: Whether to remove a protected one as well.
        foreign: Whether the directory may be another library's checkpoint. Else one that is no
            checkpoint of Penstock and holds some, as a store does, is refused.

    Returns:
        The bytes freed.

    Raises:
        CheckpointNotFoundError: There is nothing.
        ProtectedCheckpointError: It is protected, or one below it is.
        StorageError: A save or a load is under way in it or below it (``errno.EBUSY``), nothing
            tells whether one is, it is refused (``errno.EINVAL``; a path that ends in ``.`` or
            ``..``, too), or the operating system failed an operation. Called again, it goes on.
    """
    return _native.remove_checkpoint(path, force=force, foreign=foreign)
