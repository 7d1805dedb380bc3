"""`check_unsealing`: a job that writes clear files reads a sealed checkpoint only when asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import _native
from penstock.checkpoint.loading.path_kind import describing_contents
from penstock.errors import PenstockError, SealedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.sealing import Identities, Key


def is_sealed(path: str) -> bool:
    """Whether a checkpoint says that it is sealed; False if its description cannot be read."""
    try:
        return _recipients(path) is not None
    except PenstockError:
        return False


def _recipients(path: str) -> list[str] | None:
    with describing_contents(path):
        opened = _native.open(path, sealed_ok=True)
    opened.release()
    return opened.recipients


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
    if (unseal and identities is not None) or _recipients(path) is None:
        return
    keys = "--identity FILE" if unseal_by.startswith("--") else "identities="
    raise SealedError(
        f"{path} is sealed, and this would write its contents in the clear: if that is wanted, "
        f"give {unseal_by} and {keys}",
        path=path,
    )
