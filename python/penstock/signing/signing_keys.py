"""`SigningKeys`: the private keys that sign."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Self

from penstock import _native
from penstock.signing.values import to_native

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.signing.values import SignatureKey

__all__ = ["SigningKeys"]


class SigningKeys:
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

    __slots__ = ("native",)

    native: _native.SigningKeys
    """The keys as the native module signs with them."""

    def __init__(self, keys: SignatureKey | Iterable[SignatureKey]) -> None:
        self.native = _native.SigningKeys(to_native(keys, "key"))

    @classmethod
    def resolve(
        cls, keys: SigningKeys | SignatureKey | Iterable[SignatureKey] | None
    ) -> SigningKeys | None:
        """Returns the keys of an argument; None for None.

        Raises:
            KeyFileError: A text or a file is no private key that signs.
            StorageError: A file cannot be read.
            TypeError: A key has the wrong type.
        """
        return keys if keys is None or isinstance(keys, SigningKeys) else cls(keys)

    @property
    def signers(self) -> tuple[str, ...]:
        """The keys in public: ``SHA256:…`` of ssh, ``P-256 key …`` of OpenSSF."""
        return tuple(self.native.signers())

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "SigningKeys hold secrets, so they are not pickled: make them in each process"
        )

    def __repr__(self) -> str:
        if not hasattr(self, "native"):
            # Shown in the traceback of a key that is none.
            return "SigningKeys()"
        return f"SigningKeys({list(self.signers)})"
