"""`Mirror`: the bucket to which a store's steps are copied, and the copying's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.common.option_kinds import Number
from penstock.common.paths import of_bucket
from penstock.errors import UnsupportedPathError
from penstock.sealing.identities import Identities
from penstock.sealing.sealing import Sealing, check_sealing
from penstock.sealing.unsealing import Unsealing
from penstock.tensors.arguments import STEP_MAX, decode_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.sealing import Key

_EVERY = Number(1, STEP_MAX, "steps", is_open=False)
_KEEP_LOCAL = Number(1, STEP_MAX, "steps")
_RATE = Number(1, (1 << 63) - 1, "bytes a second")
_CONNECTIONS = Number(1, 256, "requests", is_open=False)


@dataclass(frozen=True, slots=True)
class Mirror:
    """The bucket to which steps are copied, and how; see `penstock.CheckpointStore`.

    Attributes:
        url: The mirror's directory in a bucket, such as ``s3://BUCKET/RUN``; `penstock.Remote` sets
            the access to the bucket.
        every: Copy the steps that are multiples of this; 1 for all.
        keep_local: Number of newest complete steps to keep on local storage. An older step is
            deleted when its copy is complete and verified to be there, unless the step is protected
            or in use. None leaves deletion to the store's own rules.
        wait: Whether a save waits for its copy: ``"never"``, or ``"commit"`` until its step is
            complete at the mirror.
        bytes_per_second: Upper bound of the send rate; None for no bound.
        connections: Number of concurrent requests. Each holds a part of an upload in memory, 8 MiB
            unless `penstock.Remote` sets another size.
        sealing: For whom copies of clear steps are sealed; see `penstock.save`. Loads then refuse
            clear copies at the mirror. None to copy the files of a step as they are, which a store
            with ``sealing`` has sealed already.
        identities: Keys that open the copies that ``sealing`` seals; see `penstock.load`. None for
            the file that ``PENSTOCK_IDENTITIES`` names, if any.

    Raises:
        UnsupportedPathError: ``url`` is not the URL of a bucket.
        ValueError: An argument is out of range, or ``identities`` are given without ``sealing``.
        KeyFileError: An identity is no secret key.

    Example:
        >>> import penstock
        >>> penstock.Mirror("s3://checkpoints/run-7", every=1000, keep_local=2).every
        1000
    """

    url: str
    every: int = 1
    keep_local: int | None = None
    wait: Literal["never", "commit"] = "never"
    bytes_per_second: int | None = None
    connections: int = 8
    sealing: Sealing | None = None
    identities: Identities | Key | Iterable[Key] | None = None

    def __post_init__(self) -> None:
        url = decode_path(self.url)
        if not of_bucket(url):
            what = "a mirror is in a bucket: give a URL such as s3://BUCKET/DIRECTORY"
            raise UnsupportedPathError(f"{url}: {what}", path=url, scheme="")
        # Stored in canonical form.
        object.__setattr__(self, "url", url)
        _EVERY.check("every", self.every)
        _KEEP_LOCAL.check("keep_local", self.keep_local)
        _RATE.check("bytes_per_second", self.bytes_per_second)
        _CONNECTIONS.check("connections", self.connections)
        if self.wait not in ("never", "commit"):
            raise ValueError(f"wait={self.wait!r}: must be one of 'never', 'commit'")
        check_sealing(self.sealing)
        if self.identities is None:
            return
        if self.sealing is None:
            raise ValueError(
                "identities=: they open the copies that Mirror(sealing=) seals; give those that "
                "open the steps of a store to the store"
            )
        # Read now, so that a wrong key stops a run at its begin.
        object.__setattr__(self, "identities", Identities.resolve(self.identities))

    @property
    def unsealing(self) -> Unsealing | None:
        """How copies are opened; None to open them as the store's own steps."""
        if self.sealing is None:
            return None
        return Unsealing.of(self.identities, is_demanded=True)

    def is_due(self, step: int) -> bool:
        """Whether a step is to be copied."""
        return step % self.every == 0
