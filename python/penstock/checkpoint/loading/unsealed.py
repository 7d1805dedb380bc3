"""`check_unsealing`: a job that writes clear files reads a sealed checkpoint only when asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import _native
from penstock.checkpoint.loading.path_kind import describing_contents
from penstock.errors import SealedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.sealing import Identities, Key


def check_unsealing(
    path: str,
    *,
    unseal: bool,
    identities: Identities | Key | Iterable[Key] | None,
    unseal_by: str,
) -> None:
    """Refuses a sealed checkpoint that nobody has asked to write in the clear.

    Identities of the environment do not ask for it, so they must be given as well.

    Args:
        path: The checkpoint's directory.
        unseal: Whether the caller asks for it.
        identities: The caller's identities.
        unseal_by: How the caller asks for it, for the error: ``"unseal=True"``.

    Raises:
        SealedError: The checkpoint is sealed, and ``unseal`` is False or there are no identities.
        PenstockError: It cannot be opened.
    """
    with describing_contents(path):
        opened = _native.open(path, sealed_ok=True)
    is_sealed = opened.recipients is not None
    opened.release()
    if not is_sealed or (unseal and identities is not None):
        return
    keys = "--identity FILE" if unseal_by.startswith("--") else "identities="
    raise SealedError(
        f"{path} is sealed, and this would write its contents in the clear: if that is wanted, "
        f"give {unseal_by} and {keys}",
        path=path,
    )
