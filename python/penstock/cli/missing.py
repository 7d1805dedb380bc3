"""The table of tensors that could not be salvaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.common.console import shape, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rich.table import Table

    from penstock.reports import MissingInfo


def missing_table(
    missing: Iterable[MissingInfo], shown: Callable[[str], str] = lambda reason: reason
) -> Table:
    """Makes a table of tensors that could not be salvaged; with their ranks if many ranks saved."""
    missing = list(missing)
    is_many = any(entry.rank is not None for entry in missing)
    whose = ["of"] if is_many else []
    columns = ("missing", "dtype", "shape", *whose, "reason")
    rows = table(*columns, folded=["missing", "shape", "reason"])
    for entry in missing:
        of = ["all" if entry.rank is None else f"rank {entry.rank}"] if is_many else []
        rows.add_row(entry.name, entry.dtype, shape(entry.shape), *of, shown(entry.reason))
    return rows
