"""Key management services, called by the URI of a key through their own Python clients.

A client is imported when the first key of its service is used.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Protocol

from penstock.errors import KmsError, MissingDependencyError, PenstockError

__all__ = ["CLIENTS", "KmsClient", "register_kms"]

_MODULES = {
    "aws-kms": ("aws", "boto3"),
    "gcp-kms": ("gcp", "google-cloud-kms"),
    "hcvault": ("vault", "hvac"),
}
"""Module of each scheme, and the package that it needs."""


class KmsClient(Protocol):
    """A key management service, for `register_kms`.

    Both methods may raise any exception, which becomes the cause of a `KmsError`.
    """

    def encrypt(self, uri: str, key: bytes) -> bytes:
        """Encrypts 32 bytes with the key of a URI; returns at most 8 KiB."""
        ...

    def decrypt(self, uri: str, encrypted: bytes) -> bytes:
        """Decrypts the result of `encrypt`."""
        ...


def register_kms(scheme: str, client: KmsClient) -> None:
    """Makes a client serve all URIs of a scheme, in this process.

    Args:
        scheme: The part of URIs before ``://``, such as ``"azure-kms"``.
        client: The client. Its methods may be called by any thread.

    Raises:
        ValueError: The scheme has characters other than letters, digits, ``+``, ``-`` and ``.``.

    Example:
        >>> class Inverted:
        ...     def encrypt(self, uri, key):
        ...         return bytes(255 - byte for byte in key)
        ...     decrypt = encrypt
        >>> register_kms("inverted", Inverted())
    """
    if not re.fullmatch(r"[A-Za-z0-9+.-]+", scheme):
        raise ValueError(f"scheme={scheme!r}: must be letters, digits, +, - and .")
    CLIENTS.clients[scheme] = client


class _Clients:
    """Calls the client of a URI; an error of it becomes a `KmsError`."""

    def __init__(self) -> None:
        self.clients: dict[str, KmsClient] = {}

    def encrypt(self, uri: str, key: bytes) -> bytes:
        """Encrypts a key of the process."""
        try:
            return bytes(self._of(uri).encrypt(uri, key))
        except Exception as error:
            raise _described(uri, error) from _without_frames(error)

    def decrypt(self, uri: str, encrypted: bytes) -> bytes:
        """Decrypts a key of a process."""
        try:
            return bytes(self._of(uri).decrypt(uri, encrypted))
        except Exception as error:
            raise _described(uri, error) from _without_frames(error)

    def _of(self, uri: str) -> KmsClient:
        scheme = uri.partition("://")[0]
        if scheme in self.clients:
            return self.clients[scheme]
        if scheme not in _MODULES:
            known = ", ".join(sorted({*_MODULES, *self.clients}))
            raise KmsError(
                f"{uri}: no client for this scheme; use one of {known}, or register a client with "
                "penstock.sealing.register_kms",
                uri=uri,
            )
        module, package = _MODULES[scheme]
        try:
            client: KmsClient = import_module(f"penstock.sealing.kms.{module}").Client()
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"{uri}: its client is not installed: pip install {package}", name=package
            ) from error
        return self.clients.setdefault(scheme, client)


def _described(uri: str, error: Exception) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    reason = str(error) or type(error).__name__
    return KmsError(
        f"{uri}: {reason}; check the URI, the credentials of this process and their permissions",
        uri=uri,
    )


def _without_frames(error: BaseException) -> BaseException | None:
    """Drops the frames of an error and of those behind it, whose variables are keys."""
    links: list[BaseException | None] = [error]
    seen: set[int] = set()
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            link.__traceback__ = None
            links += [link.__cause__, link.__context__]
    return None if isinstance(error, PenstockError) else error


CLIENTS = _Clients()
"""The clients of this process."""
