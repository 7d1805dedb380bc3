"""`penstock diff A B`: shows where two checkpoints differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.examples import example
from penstock.cli.keys.given import identity_option, opened_by
from penstock.cli.paths import checkpoint_at
from penstock.common.console import (
    PLACE,
    console,
    json_option,
    print_json,
    progress_bar,
    shape,
    shortened,
    size,
    table,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

ROWS_MAX = 20
"""Rows shown for each kind of difference."""

JSON_KEYS = """\b
JSON: a, b (paths), same, tensors_compared, bytes_compared,
  only_in_a, only_in_b: lists of names,
  changed: names of values with another type or shape: a list of name, a and
    b, each with dtype and shape,
  ties: tensors that share memory with other tensors in one checkpoint than
    in the other: a list of name, a and b, each a list of names,
  values: plain leaves that differ: a list of name, a and b (as Python
    literals),
  tensors: those whose bytes differ: a list of name, elements, differing
    (a count), max_abs_difference (null where it is no finite number).
"""


@click.command(
    epilog=example(
        "penstock diff /checkpoints/step-0000001000 /checkpoints/step-0000002000", after=JSON_KEYS
    )
)
@click.argument("a", type=PLACE)
@click.argument("b", type=PLACE)
@click.option("--all", "lists_all", is_flag=True, help="List every difference, however many.")
@identity_option
@json_option
def diff(a: str, b: str, lists_all: bool, identities: tuple[str, ...], as_json: bool) -> int:
    """Compare the checkpoints A and B; of a store, its newest complete step.

    Tensors are compared bit for bit. Exits with 1 if the checkpoints differ in names, types,
    shapes, ties or content. Of each kind of difference the first are listed.
    """
    # Imported here, as it imports NumPy, which helps do not need.
    from penstock.cli.compare import compare_checkpoints

    (path_a, note_a), (path_b, note_b) = checkpoint_at(a), checkpoint_at(b)
    opened = opened_by(identities)
    with progress_bar("comparing", hidden=as_json) as update:
        result = compare_checkpoints(path_a, path_b, update, opened)
    if as_json:
        for row in result["tensors"]:
            distance = row["max_abs_difference"]
            if distance is not None and not math.isfinite(distance):
                row["max_abs_difference"] = None
        print_json(result)
    else:
        for note in filter(None, (note_a, note_b)):
            console().print(note, style="dim")
        _print(result, None if lists_all else ROWS_MAX)
    return 0 if result["same"] else 1


def _print(result: dict[str, Any], rows_max: int | None) -> None:
    out = console()
    for side in ("a", "b"):
        heading = f"only in {result[side]}"
        rows = table(heading, folded=[heading])
        for name in result[f"only_in_{side}"][:rows_max]:
            rows.add_row(name)
        _print_first(rows, len(result[f"only_in_{side}"]))
    _print_sides("changed", result["changed"], _kind_text, rows_max)
    _print_sides("tied", result["ties"], lambda names: ", ".join(names) or "not tied", rows_max)
    _print_sides("plain leaf", result["values"], shortened, rows_max)
    numbers = ("elements", "differing", "max difference")
    rows = table("tensor", *numbers, numbers=numbers, folded=["tensor"])
    for row in result["tensors"][:rows_max]:
        distance = row["max_abs_difference"]
        apart = "" if distance is None else f"{distance:.6g}"
        rows.add_row(row["name"], str(row["elements"]), str(row["differing"]), apart)
    _print_first(rows, len(result["tensors"]))
    compared = f"{result['tensors_compared']:,} tensors, {size(result['bytes_compared'])}"
    out.print(f"{'same' if result['same'] else 'different'}; compared {compared}")


def _print_sides(
    heading: str, rows: list[dict[str, Any]], text: Callable[[Any], str], rows_max: int | None
) -> None:
    columns = (heading, "a", "b")
    made = table(*columns, folded=columns)
    for row in rows[:rows_max]:
        made.add_row(row["name"], text(row["a"]), text(row["b"]))
    _print_first(made, len(rows))


def _print_first(rows: Table, count: int) -> None:
    """Prints a table, if it has rows, and how many were left out."""
    if not count:
        return
    out = console()
    out.print(rows)
    if rows.row_count < count:
        out.print(f"and {count - rows.row_count:,} more; --all lists them", style="dim")
    out.print()


def _kind_text(kind: dict[str, Any]) -> str:
    return f"{kind['dtype']} {shape(tuple(kind['shape']))}"
