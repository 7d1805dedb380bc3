"""`penstock inspect PATH`: shows what is in a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

import penstock
from penstock.cli.examples import example
from penstock.cli.folding import Folded, fold
from penstock.cli.keys.given import identity_option
from penstock.cli.missing import missing_table
from penstock.cli.paths import checkpoint_at
from penstock.common.console import (
    PLACE,
    console,
    json_option,
    local_time,
    print_json,
    shape,
    shortened,
    size,
    summary_table,
    table,
)
from penstock.common.file_names import FileNames

if TYPE_CHECKING:
    from rich.table import Table

ROWS_MAX = 40


JSON_KEYS = """\b
JSON: path, id, step, created (UTC), writer, format_version, world_size,
  bytes (of all files), tensor_bytes, metadata,
  files: a list of name, bytes,
  tensors: a list of name, dtype, shape, file, begin, end (bytes in the
    file), bytes, rank (its owner, or null), pieces (with many ranks): a
    list of start, shape, file, begin, end,
  aliases: further names of tensors and of views into them, to the
    tensor's name,
  values: plain leaves, name to Python literal; null without --values,
  partial (salvaged from a damaged one), source_id (of that one, or null),
  unverified, missing: a list of name, dtype, shape, reason, rank (its
    owner; null if ranks share it),
  recipients (of a sealed one; else null), closed (sealed and not opened,
    so that it shows no tensors), previous: ids of the checkpoints before
    it, newest first.
"""


@click.command(
    epilog=example("penstock inspect /checkpoints --keys 'model.*' --values", after=JSON_KEYS)
)
@click.argument("path", type=PLACE)
@click.option(
    "--keys",
    multiple=True,
    metavar="PATTERN",
    help="Only names that match, as in 'model.*'; may be given more than once.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    help=f"Rows of each table at most; 0 for all. [default: {ROWS_MAX}; with --all or --json all]",
)
@click.option("--all", "lists_all", is_flag=True, help="A line for each tensor, and all of them.")
@click.option("--values", "with_values", is_flag=True, help="Also show the plain leaves.")
@identity_option
@json_option
def inspect(
    path: str,
    keys: tuple[str, ...],
    limit: int | None,
    lists_all: bool,
    with_values: bool,
    identities: tuple[str, ...],
    as_json: bool,
) -> int:
    """Show what is in the checkpoint PATH; of a store, in its newest complete step.

    No tensor data is read. Tensors of one kind whose names differ only in numbers share a line:
    layers.{0..31}.weight stands for 32.
    """
    checkpoint, note = checkpoint_at(path)
    info = penstock.inspect(checkpoint, identities=identities or None)
    result = _select(info, info.values() if with_values else None, keys)
    if as_json:
        for name in ("tensors", "aliases", "values", "missing"):
            result[name] = _first(result[name], limit or 0)
        print_json(result)
    else:
        if note:
            console().print(note, style="dim")
        rows_max = 0 if lists_all else ROWS_MAX
        _print(result, rows_max if limit is None else limit, folds=not lists_all)
    return 0


def _select(
    info: penstock.reports.CheckpointInfo, values: dict[str, Any] | None, keys: tuple[str, ...]
) -> dict[str, Any]:
    """Everything to show, restricted to the requested names."""
    # Imported here, as it imports NumPy, which helps do not need.
    from penstock.checkpoint.state.tree.names import matcher

    matchers = [matcher(key) for key in keys]

    def is_wanted(name: str) -> bool:
        return not keys or any(matches(name) for matches in matchers)

    return {
        "path": info.path,
        "id": info.id,
        "step": info.step,
        "created": info.created,
        "writer": info.writer,
        "format_version": info.format_version,
        "world_size": info.world_size,
        "bytes": info.bytes,
        "tensor_bytes": info.tensor_bytes,
        "metadata": info.metadata,
        "files": [file._asdict() for file in info.files],
        "tensors": [
            {
                **dataclasses.asdict(tensor),
                "bytes": tensor.bytes,
                "pieces": [piece._asdict() for piece in tensor.pieces],
            }
            for tensor in info.tensors
            if is_wanted(tensor.name)
        ],
        "aliases": {name: target for name, target in info.aliases.items() if is_wanted(name)},
        "partial": info.partial,
        "source_id": info.source_id,
        "unverified": info.unverified,
        "recipients": None if info.recipients is None else list(info.recipients),
        "closed": info.is_closed,
        "previous": list(info.previous),
        "missing": [dataclasses.asdict(row) for row in info.missing if is_wanted(row.name)],
        "values": None
        if values is None
        else {name: repr(value) for name, value in values.items() if is_wanted(name)},
    }


def _print(result: dict[str, Any], rows_max: int, *, folds: bool) -> None:
    files, tensors = result["files"], result["tensors"]
    summary = summary_table(
        ("path", result["path"]),
        ("step", "none" if result["step"] is None else str(result["step"])),
        ("created", local_time(result["created"])),
        ("id", result["id"]),
        *_previous(result["previous"]),
        ("written by", _writer(result)),
        ("size", f"{size(result['bytes'])} in {len(files)} files"),
        *_partial(result),
        *_sealed(result),
    )
    console().print(summary)
    if tensors:
        _print_tensors(tensors, rows_max, is_many=result["world_size"] > 1, folds=folds)
    _print_missing(result["missing"], rows_max)
    _print_pairs("alias", "tensor", result["aliases"], rows_max, "aliases")
    if result["values"] is not None:
        _print_pairs("plain leaf", "value", result["values"], rows_max, "plain leaves")


def _previous(ids: list[str]) -> list[tuple[str, str]]:
    more = f" and {len(ids) - 1} before" if len(ids) > 1 else ""
    return [("follows", ids[0] + more)] if ids else []


def _sealed(result: dict[str, Any]) -> list[tuple[str, str]]:
    recipients, tensors = result["recipients"], result["tensors"]
    rows = [] if recipients is None else [("sealed for", ", ".join(recipients) or "nobody")]
    if result["closed"]:
        return [*rows, ("tensors", "sealed: --identity FILE opens them")]
    nbytes = size(sum(tensor["bytes"] for tensor in tensors))
    metadata = json.dumps(result["metadata"], ensure_ascii=False)
    return [*rows, ("tensors", f"{len(tensors):,}, {nbytes}"), ("metadata", metadata)]


def _print_tensors(
    tensors: list[dict[str, Any]], rows_max: int, *, is_many: bool, folds: bool
) -> None:
    lines = [Folded(tensor["name"], [index]) for index, tensor in enumerate(tensors)]
    if folds:
        lines = fold((one["name"], (one["dtype"], one["shape"], _holders(one))) for one in tensors)
    is_folded = len(lines) < len(tensors)
    counts, many = ["count"] if is_folded else [], ["of"] if is_many else []
    columns = ["tensor", *counts, "dtype", "shape", "size", *many]
    rows = table(*columns, numbers=["size", *counts], folded=["tensor", "shape"])
    for name, indices in _first(lines, rows_max):
        first = tensors[indices[0]]
        nbytes = sum(tensors[index]["bytes"] for index in indices)
        count = [f"{len(indices):,}"] if is_folded else []
        whose = [_holders(first)] if is_many else []
        rows.add_row(name, *count, first["dtype"], shape(first["shape"]), size(nbytes), *whose)
    _print_table(rows, len(lines), "lines" if is_folded else "tensors")


def _writer(result: dict[str, Any]) -> str:
    ranks = result["world_size"]
    by = f", {ranks} ranks" if ranks > 1 else ""
    return f"{result['writer']}{by}, format version {result['format_version']}"


def _holders(tensor: dict[str, Any]) -> str:
    """The rank that owns a tensor, or the number of its pieces, in checkpoints of many ranks."""
    if tensor["rank"] is not None:
        return f"rank {tensor['rank']}"
    count = len(tensor["pieces"])
    return "1 piece" if count == 1 else f"{count} pieces"


def _partial(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows for a salvaged checkpoint; none for others."""
    if not result["partial"]:
        return []
    proof = "nothing vouches for its contents" if result["unverified"] else "every tensor intact"
    source = result["source_id"] or "unknown"
    return [("partial", f"salvaged from {source}, {proof}")]


def _print_missing(missing: list[dict[str, Any]], rows_max: int) -> None:
    if missing:
        names = FileNames("", (row["reason"] for row in missing))
        shown = [penstock.reports.MissingInfo(**row) for row in _first(missing, rows_max)]
        rows = missing_table(shown, names.short)
        _print_table(rows, len(missing), "missing")


def _print_pairs(
    heading: str, value_heading: str, pairs: dict[str, str], rows_max: int, plural: str
) -> None:
    if pairs:
        rows = table(heading, value_heading, folded=[heading, value_heading])
        for name, value in _first(pairs, rows_max).items():
            rows.add_row(name, shortened(value))
        _print_table(rows, len(pairs), plural)


def _print_table(rows: Table, count: int, plural: str) -> None:
    """Prints a table, and how many rows were left out."""
    out = console()
    out.print("", rows)
    if rows.row_count < count:
        out.print(f"{rows.row_count} of {count:,} {plural}; --all shows all", style="dim")


def _first(items: Any, rows_max: int) -> Any:
    """The first entries of a list or a dict; all of them for 0."""
    rows = slice(rows_max or None)
    if isinstance(items, dict):
        return dict(list(items.items())[rows])
    return items if items is None else items[rows]
