"""`to_torch`: writes a tag as DeepSpeed's own engine would."""

from __future__ import annotations

import io
import os
import shutil
from typing import TYPE_CHECKING

from penstock.errors import CheckpointNotFoundError
from penstock.integrations.deepspeed import tags
from penstock.plugin import SealingKeys, check_unsealing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.sealing import Identities, Key
    from penstock.signing import SignatureKey, Signers


def to_torch(
    load_dir: str | os.PathLike[str],
    save_dir: str | os.PathLike[str],
    *,
    tag: str | None = None,
    trust: bool = False,
    unseal: bool = False,
    identities: Identities | Key | Iterable[Key] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> str:
    """Writes a tag as files of `torch.save`, for ``zero_to_fp32.py`` and ``ds_to_universal.py``.

    It needs memory for three times the largest file.

    Args:
        load_dir: The directory given to ``engine.save_checkpoint``.
        save_dir: Another directory, for the tag and a file ``latest``.
        tag: The tag; None for the one that ``latest`` names.
        trust: Whether pickled values are unpickled.
        unseal: Whether a sealed tag is written in the clear.
        identities: Keys that open a sealed tag; see `penstock.load`.
        signed_by: Public keys of which one must have signed the tag; see `penstock.load`.

    Returns:
        The directory of the tag in ``save_dir``.

    Raises:
        CheckpointNotFoundError: There is no such tag.
        FileExistsError: The tag is in ``save_dir`` already.
        SealedError: The tag is sealed, and ``unseal`` is False or there are no identities.
        PenstockError: It cannot be read.
    """
    import deepspeed.utils
    import torch

    load_dir, save_dir = os.path.abspath(load_dir), os.path.abspath(save_dir)
    if tag is None:
        tag = _latest(load_dir)
    source, target = os.path.join(load_dir, tag), os.path.join(save_dir, tag)
    names = tags.stubs(source) if os.path.isdir(source) else []
    if not names:
        raise CheckpointNotFoundError(
            f"{source} is no tag that Penstock has saved: give the directory that was given to "
            "save_checkpoint",
            path=source,
        )
    keys = SealingKeys.of(None, identities, signed_by=signed_by)
    check_unsealing(source, unseal=unseal, identities=identities, unseal_by="unseal=True")
    os.makedirs(target)
    for name in names:
        buffer = io.BytesIO()
        try:
            state = tags.read_file(os.path.join(source, name), trust=trust, keys=keys)
        except CheckpointNotFoundError:
            # A stub of other ranks, from an earlier save of the tag.
            continue
        torch.save(state, buffer)
        tags.write(os.path.join(target, name), buffer.getvalue())
    script = os.path.join(os.path.dirname(deepspeed.utils.__file__), "zero_to_fp32.py")
    shutil.copy(script, save_dir)
    tags.write(os.path.join(save_dir, "latest"), tag.encode())
    return target


def _latest(load_dir: str) -> str:
    path = os.path.join(load_dir, "latest")
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path} is not there: give a tag", path=path) from None
