"""`SigningKeys`: the private keys that sign."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import _native
from penstock.common.held_keys import HeldKeys
from penstock.signing.values import to_native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.signing.values import SignatureKey

__all__ = ["SigningKeys"]


class SigningKeys(HeldKeys):
    """Private keys that sign checkpoints: each makes a signature, at most one of each kind.

    Args:
        keys: Private keys, as `penstock.signing` describes them. An ssh key with a passphrase opens
            by one that stands before it.

    Raises:
        KeyFileError: A text or a file is no private key that signs; a `ValueError` too.
        StorageError: A file cannot be read; an `OSError` too.
        TypeError: A key has the wrong type.
        ValueError: There is no key.
    """

    __slots__ = ()

    native: _native.SigningKeys
    """The keys as the native module signs with them."""

    def __init__(self, keys: SignatureKey | Iterable[SignatureKey]) -> None:
        self.native = _native.SigningKeys(to_native(keys, "key"))

    @property
    def signers(self) -> tuple[str, ...]:
        """The keys in public: ``SHA256:…`` of ssh, ``P-256 key …`` of OpenSSF."""
        return tuple(self.native.signers())

    def shown(self) -> str:
        """Returns the keys in public."""
        return f"{list(self.signers)}"
