"""Access to buckets: endpoints, credentials and request limits."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from penstock import _native
from penstock.common.option_kinds import Number
from penstock.common.paths import of_bucket
from penstock.errors import UnsupportedPathError
from penstock.tensors.arguments import decode_path

if TYPE_CHECKING:
    from collections.abc import Callable

    _Row = tuple[str, str, str | None, float | None]
    """A key in the form that `_native` takes."""

_MIB = 1 << 20

_PART_BYTES = Number(8 * _MIB, 1 << 30, "bytes", multiple_of=_MIB)
_CONNECTIONS = Number(1, 256, "requests")
_PATIENCE = Number(1, 86_400, "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """An S3 access key, or the name and key of an Azure storage account.

    Attributes:
        access_key_id: The name of the key; on Azure, of the account.
        secret_access_key: The secret that signs requests; not shown by ``repr``.
        session_token: The session token of a temporary S3 key; not shown by ``repr``.
        expires: The expiry time, with a time zone; None if the key does not expire.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: ``expires`` has no time zone.

    Example:
        >>> import penstock
        >>> penstock.Credentials(access_key_id="me", secret_access_key="hidden")
        Credentials(access_key_id='me', expires=None)
    """

    access_key_id: str
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    expires: datetime | None = None

    def __post_init__(self) -> None:
        for name in ("access_key_id", "secret_access_key", "session_token"):
            value = getattr(self, name)
            if type(value) is not str and not (name == "session_token" and value is None):
                # The value is not shown: it may be a secret in another form.
                raise TypeError(f"{name}: must be a str, not {type(value).__name__}")
        _check_zone(self.expires)

    def _row(self) -> _Row:
        expires = _seconds(self.expires)
        return self.access_key_id, self.secret_access_key, self.session_token, expires


def _check_zone(expires: datetime | None) -> None:
    if expires is None:
        return
    if not isinstance(expires, datetime):
        raise TypeError(f"expires={expires!r}: must be a datetime or None")
    if expires.tzinfo is None:
        raise ValueError(f"expires={expires!r}: must have a time zone")


def _seconds(expires: datetime | None) -> float | None:
    return None if expires is None else expires.timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A bearer token for Google (OAuth) or Azure (Entra ID), used instead of a key.

    Attributes:
        token: The token, without the prefix ``Bearer``; not shown by ``repr``.
        expires: The expiry time, with a time zone; None if the token does not expire.

    Raises:
        TypeError: ``token`` is not a `str`.
        ValueError: ``token`` is empty, or ``expires`` has no time zone.

    Example:
        >>> import penstock
        >>> penstock.Token(token="hidden")
        Token(expires=None)
    """

    token: str = field(repr=False)
    expires: datetime | None = None

    def __post_init__(self) -> None:
        if type(self.token) is not str:
            raise TypeError(f"token: must be a str, not {type(self.token).__name__}")
        if not self.token:
            raise ValueError("token: must not be empty")
        _check_zone(self.expires)

    def _row(self) -> _Row:
        return "", "", self.token, _seconds(self.expires)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """Access to a bucket beyond its URL. The defaults suit almost every use.

    Values that are not given come from the environment and from configuration files, as for the
    provider's own tools. For S3: ``AWS_ENDPOINT_URL``, ``AWS_REGION``, ``AWS_ACCESS_KEY_ID`` and
    related variables, ``AWS_PROFILE`` in ``~/.aws/credentials`` and ``~/.aws/config``, a web
    identity, the role of a container or of the instance. For Google:
    ``GOOGLE_APPLICATION_CREDENTIALS``, the file of ``gcloud``, the instance. For Azure:
    ``AZURE_STORAGE_ACCOUNT_NAME``, ``AZURE_STORAGE_ACCOUNT_KEY`` and related variables,
    ``AZURE_STORAGE_CONNECTION_STRING``, a workload's or managed identity.

    Attributes:
        endpoint: The URL of the service, such as ``"http://127.0.0.1:7070"``; on Azure, of the
            account.
        region: The region of the bucket; S3 only.
        credentials: `Credentials` for S3 and Azure, a `Token` for Google and Azure, or a callable
            without arguments that returns one. It is called in another thread, and again five
            minutes before the key expires, even during a save. On Azure, a callable's key must
            belong to the account that the environment or the endpoint names.
        part_bytes: Bytes of a request and of a part of an upload: a multiple of 1 MiB, 8 MiB to 1
            GiB; 8 MiB by default. A file has at most 10,000 parts.
        connections: Number of concurrent requests, 1 to 256.
        patience_seconds: How long a request is retried if it gets no answer, or the answer of a
            busy or starting server, 1 to 86400 seconds; 60 by default.
        checksums: Whether tensors are sent with a checksum that the service verifies: CRC-64/NVME
            on S3 and Azure, CRC-32C on Google. An S3-compatible service that does not support it is
            detected automatically; use False for one that fails on it.

    Raises:
        TypeError: A value has the wrong type, or an option is unknown.
        ValueError: A value is out of range.

    Example:
        >>> import penstock
        >>> penstock.Remote(endpoint="http://127.0.0.1:7070", connections=64).connections
        64
    """

    endpoint: str | None = None
    region: str | None = None
    credentials: Credentials | Token | Callable[[], Credentials | Token] | None = None
    part_bytes: int | None = None
    connections: int | None = None
    patience_seconds: int | None = None
    checksums: bool | None = None

    def __post_init__(self) -> None:
        for name in ("endpoint", "region"):
            value = getattr(self, name)
            if value is not None and type(value) is not str:
                raise TypeError(f"{name}={value!r}: must be a str or None")
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint={self.endpoint!r}: must begin with http:// or https://")
        if self.endpoint is not None and any(mark in self.endpoint for mark in "@?#"):
            # The value is not shown: it may be a secret.
            raise ValueError("endpoint: must be no more than a host, a port and a path")
        given: object = self.credentials
        if not (given is None or isinstance(given, Credentials | Token) or callable(given)):
            what = "penstock.Credentials, penstock.Token or a callable"
            raise TypeError(f"credentials: must be {what}, not {type(given).__name__}")
        _PART_BYTES.check("part_bytes", self.part_bytes)
        _CONNECTIONS.check("connections", self.connections)
        _PATIENCE.check("patience_seconds", self.patience_seconds)
        if self.checksums is not None and type(self.checksums) is not bool:
            raise TypeError(f"checksums={self.checksums!r}: must be a bool or None")


def set_remote(url: str, remote: Remote | None) -> None:
    """Sets how this process and its future forks access a bucket.

    Running saves and loads continue unchanged. Later ones use the new settings, also those of an
    open `CheckpointStore`.

    Args:
        url: A URL of the bucket; anything after the bucket's name is ignored.
        remote: The settings; None for those of the environment, which is read again.

    Raises:
        UnsupportedPathError: ``url`` is not the URL of a bucket; a `ValueError` too.
        TypeError: ``remote`` is not a `Remote`.
        ValueError: A setting has no meaning with this provider.

    Example:
        >>> import penstock
        >>> remote = penstock.Remote(endpoint="http://127.0.0.1:7070", region="us-east-1")
        >>> penstock.set_remote("s3://bucket", remote)
        >>> penstock.set_remote("s3://bucket", None)
    """
    where = decode_path(url)
    if not of_bucket(where):
        raise UnsupportedPathError(f"{where}: this is no URL of a bucket", path=where, scheme="")
    if remote is None:
        remote = Remote()
    if not isinstance(remote, Remote):
        raise TypeError(f"remote={remote!r}: must be penstock.Remote or None")
    bucket = "/".join(where.split("/")[:3])
    given = remote.credentials
    _check(bucket.partition(":")[0], remote)
    _answering.pop(bucket, None)
    questions = None
    if callable(given):
        _answering[bucket] = _Answering(given)
        questions = _answering[bucket].questions
    _native.reach(
        where,
        endpoint=remote.endpoint,
        region=remote.region,
        keys=given._row() if isinstance(given, Credentials | Token) else None,
        questions=questions,
        part_bytes=remote.part_bytes,
        connections=remote.connections,
        patience_seconds=remote.patience_seconds,
        checksums=remote.checksums,
    )


def _check(scheme: str, remote: Remote) -> None:
    """Refuses settings that the provider of a scheme does not support."""
    if scheme != "s3" and remote.region is not None:
        raise ValueError(f"region={remote.region!r}: {scheme}:// has none; leave it out")
    if scheme == "s3" and isinstance(remote.credentials, Token):
        raise ValueError("credentials: s3:// takes penstock.Credentials, no token")
    if scheme == "gs" and isinstance(remote.credentials, Credentials):
        raise ValueError("credentials: gs:// takes penstock.Token, no key")


class _Answering:
    """A thread that calls the credentials callable, as native threads must not enter Python."""

    def __init__(self, credentials: Callable[[], Credentials | Token]) -> None:
        self._credentials = credentials
        self.questions = _native.Questions()
        self.start()

    def start(self) -> None:
        """Starts the thread; also in a fork, which has none of its parent's threads."""
        threading.Thread(
            target=_answer,
            args=(self._credentials, self.questions.listen()),
            name="penstock-credentials",
            # The thread waits as long as requests may come.
            daemon=True,
        ).start()


_answering: dict[str, _Answering] = {}
"""The answering thread of each bucket."""


def _start_in_fork() -> None:
    for one in _answering.values():
        one.start()


os.register_at_fork(after_in_child=_start_in_fork)


def _answer(credentials: Callable[[], Credentials | Token], listener: _native.Listener) -> None:
    while (question := listener.next()) is not None:
        try:
            given: object = credentials()
            if not isinstance(given, Credentials | Token):
                what = "penstock.Credentials or penstock.Token"
                raise TypeError(f"credentials() gave {type(given).__name__}: must be {what}")
            question.answer(given._row())
        except BaseException as error:
            question.refuse(f"credentials() raised {type(error).__name__}: {error}")
