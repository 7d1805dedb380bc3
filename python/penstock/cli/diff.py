"""`penstock diff A B`: where two checkpoints differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.paths import checkpoint_at
from penstock.console import (
    PATH,
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
    from pathlib import Path

JSON_KEYS = """\b
JSON: a, b (paths), same, tensors_compared, bytes_compared,
  only_in_a, only_in_b: lists of names,
  changed: names that stand for something of another type or shape: a list
    of name, a and b, each with dtype and shape,
  ties: tensors that share their memory with others than in the other
    checkpoint: a list of name, a and b, each a list of names,
  values: plain leaves that differ: a list of name, a and b (as Python
    literals),
  tensors: those whose bytes differ: a list of name, elements, differing
    (a count), max_abs_difference (null where it is no finite number).
"""


@click.command(epilog=JSON_KEYS)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@json_option
def diff(a: Path, b: Path, as_json: bool) -> int:
    """Compare the checkpoints A and B; of a store, its newest complete step.

    Tensors are compared bit for bit. Exits with 1 if the checkpoints differ in names, types,
    shapes, ties or content.
    """
    # It takes NumPy, which the help of all does without.
    from penstock.cli.compare import compare_checkpoints

    (path_a, note_a), (path_b, note_b) = checkpoint_at(a), checkpoint_at(b)
    with progress_bar("comparing", hidden=as_json) as update:
        result = compare_checkpoints(path_a, path_b, update)
    if as_json:
        for row in result["tensors"]:
            distance = row["max_abs_difference"]
            if distance is not None and not math.isfinite(distance):
                row["max_abs_difference"] = None
        print_json(result)
    else:
        for note in filter(None, (note_a, note_b)):
            console().print(note, style="dim")
        _print(result)
    return 0 if result["same"] else 1


def _print(result: dict[str, Any]) -> None:
    out = console()
    for side in ("a", "b"):
        names = result[f"only_in_{side}"]
        if names:
            rows = table(f"only in {result[side]}", folded=[f"only in {result[side]}"])
            for name in names:
                rows.add_row(name)
            out.print(rows, "")
    _print_rows("changed", result["changed"], _kind_text)
    _print_rows("tied", result["ties"], lambda names: ", ".join(names) or "not tied")
    _print_rows("plain leaf", result["values"], shortened)
    if result["tensors"]:
        numbers = ("elements", "differing", "max difference")
        rows = table("tensor", *numbers, numbers=numbers, folded=["tensor"])
        for row in result["tensors"]:
            distance = row["max_abs_difference"]
            apart = "" if distance is None else f"{distance:.6g}"
            rows.add_row(row["name"], str(row["elements"]), str(row["differing"]), apart)
        out.print(rows, "")
    compared = f"{result['tensors_compared']} tensors, {size(result['bytes_compared'])}"
    out.print(f"{'same' if result['same'] else 'different'}; compared {compared}")


def _print_rows(heading: str, rows: list[dict[str, Any]], text: Callable[[Any], str]) -> None:
    if rows:
        columns = (heading, "a", "b")
        made = table(*columns, folded=columns)
        for row in rows:
            made.add_row(row["name"], text(row["a"]), text(row["b"]))
        console().print(made, "")


def _kind_text(kind: dict[str, Any]) -> str:
    return f"{kind['dtype']} {shape(tuple(kind['shape']))}"
