"""`own_io`: a `TensorIO` of one's own, with the settings of the one that a caller gives."""

from __future__ import annotations

from dataclasses import replace

from penstock.io.executors import Choice
from penstock.io.tensor_io import TensorIO, with_settings
from penstock.options import Options


def own_io(io: TensorIO | None) -> TensorIO:
    """One with the settings of a caller's; with the usual ones where there is none.

    Raises:
        TypeError: It is something else.
    """
    if io is None:
        return TensorIO()
    if not isinstance(io, TensorIO):
        raise TypeError(f"io={io!r:.80}: must be a penstock.offload.TensorIO or None")
    return io._another()


def for_rows(io: TensorIO | None = None) -> TensorIO:
    """The same for tables: with settings for small reads where there is none.

    Raises:
        TypeError: It is something else.
    """
    if io is not None:
        return own_io(io)
    return with_settings(replace(Choice.of(None), is_for_rows=True), Options().direct, 1)
