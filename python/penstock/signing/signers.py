"""`Signers`: whose signatures are accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import _native
from penstock.common.held_keys import HeldKeys
from penstock.signing.values import to_native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.signing.values import SignatureKey

__all__ = ["Signers"]


class Signers(HeldKeys):
    """The public keys of those whose signature is accepted; one of them suffices.

    Args:
        keys: Public keys, as `penstock.signing` describes them. Of an ``allowed_signers`` file,
            keys of other kinds are left out; an option other than ``namespaces="…"`` is refused,
            as it could forbid a signature.

    Raises:
        KeyFileError: A text or a file holds no public key that signs; a `ValueError` too.
        StorageError: A file cannot be read; an `OSError` too.
        TypeError: A key has the wrong type.
        ValueError: There is no key.

    Example:
        >>> key = "AAAAC3NzaC1lZDI1NTE5AAAAILM+rvN+ot98qgEN796jTiQfZfG1KaT0PtFDJ/XFSqti"
        >>> Signers(f"ssh-ed25519 {key}")
        Signers(1 key)
    """

    __slots__ = ()

    native: _native.Signers
    """The keys as the native module checks with them."""

    def __init__(self, keys: SignatureKey | Iterable[SignatureKey]) -> None:
        self.native = _native.Signers(to_native(keys, "signed_by"))
