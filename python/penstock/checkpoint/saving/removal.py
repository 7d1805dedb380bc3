"""`remove_checkpoint`: removes a checkpoint's directory as a store removes a step."""

from __future__ import annotations

from penstock import _native


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
