"""Functions of a `TensorIO` for other packages: a copy of its own, its workers, its end."""

from __future__ import annotations

from dataclasses import replace

from penstock.io.executors import Choice
from penstock.io.tensor_io import Claim, TensorIO, with_settings
from penstock.options import Options


def own_io(io: TensorIO | None) -> TensorIO:
    """Returns a new `TensorIO` with the settings of a given one, or with the defaults."""
    if io is None:
        return TensorIO()
    if not isinstance(io, TensorIO):
        raise TypeError(f"io={io!r:.80}: must be a penstock.offload.TensorIO or None")
    return another(io)


def for_rows(io: TensorIO | None = None) -> TensorIO:
    """Returns a new `TensorIO` like `own_io`, by default with settings for small reads."""
    if io is not None:
        return own_io(io)
    return with_settings(replace(Choice.of(None), is_for_rows=True), Options().direct, 1)


def another(io: TensorIO, *, direct: str | None = None) -> TensorIO:
    """One with the same settings and a share of the device of its own.

    ``direct``: whether its files are opened past the page cache; None for the same.
    """
    return io._another(direct=direct)


def claim_of(io: TensorIO) -> Claim:
    """Its claim on the workers of this process, for requests that are not of tensors."""
    return io._claim_here()


def wait_until_idle(io: TensorIO) -> None:
    """Waits for everything under way; failures stay for their transfers to raise."""
    io._wait_ended()
