"""`penstock verify PATH`: compares every byte with its digest."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import click

import penstock
from penstock.cli import explain
from penstock.cli.examples import example
from penstock.cli.keys.given import identity_option
from penstock.cli.paths import check_directory, is_store
from penstock.common.console import (
    PLACE,
    console,
    json_option,
    print_json,
    progress_bar,
    size,
    table,
)
from penstock.common.file_names import FileNames
from penstock.signing import Signers

if TYPE_CHECKING:
    from penstock.checkpoint.steps.rows import StepInfo, Succession

PROBLEMS_MAX = 40
"""Most problems shown of a checkpoint."""

JSON_KEYS = """\b
JSON: path, ok, bytes_checked,
  checkpoints: a list of path, ok, bytes_checked, files, tensors, seconds,
    is_partial (salvaged, may lack tensors), is_sealed (no tag was checked),
    signer (the key that signed it; null without --signed-by),
    problems: a list of file, offset, tensor (null where unknown), message,
      is_proven (wrong bytes; else senseless or unread),
  incomplete: the paths of steps that were never finished,
  succession: of a store, a list of step, checkpoint_id, previous (ids of
    the checkpoints before it, newest first), state ("begins", "follows",
    "gap": steps between are gone, "breaks": it does not list the step
    before); else an empty list.

\b
JSON with --explain: path, ok, step, described_by ("whole": manifest and
  part vouch for all; "part": the manifest is lost; "headers": a part is),
  world_size, ranks_lost (those whose part is lost),
  intact, unverified, hit: each a count and bytes of tensors,
  tensors: a list of name, dtype, shape, bytes, hit (why, or null),
    rank (its owner; null if ranks share it), is_vouched_for,
  missing_files, problems, bytes_checked, seconds,
  earlier_step (complete, not known to be damaged, or null),
  earlier_is_verified.
"""


@click.command(
    epilog=example(
        "penstock verify /checkpoints",
        "penstock verify /checkpoints/step-0000001000 --explain",
        "penstock verify /checkpoints --signed-by allowed_signers",
        after=JSON_KEYS,
    )
)
@click.argument("path", type=PLACE)
@click.option(
    "--explain",
    "explains",
    is_flag=True,
    help="Say which tensors of a damaged checkpoint are still intact.",
)
@click.option(
    "--signed-by",
    "signers",
    metavar="FILE",
    multiple=True,
    help="Refuse a checkpoint that none of the public keys in FILE has signed, and compare every "
    "file with the signature: a key in PEM, a .pub file of ssh, or allowed_signers; may be given "
    "more than once.",
)
@identity_option
@json_option
def verify(
    path: str,
    explains: bool,
    signers: tuple[str, ...],
    identities: tuple[str, ...],
    as_json: bool,
) -> int:
    """Read every byte of PATH and compare it with its digest.

    PATH is a checkpoint, or a store: then all its steps are checked, except those whose save
    never finished, and the store records the results, which penstock ls shows. Exits with 1 if
    anything is wrong. Also names sealed and signed steps that do not list the step before among
    their former ones; as a run may go back, this does not change the exit code.
    """
    check_directory(path)
    if explains and signers:
        raise click.UsageError("--explain looks at no signature: give one of the two")
    signed_by = Signers(signers) if signers else None
    if explains:
        return _explain(path, identities, as_json=as_json)
    if identities:
        raise click.UsageError("--identity: digests are compared without a key; --explain takes it")
    incomplete: list[str] = []
    succession: list[Succession] = []
    if is_store(path):
        results, incomplete = _verify_store(path, signed_by, hidden=as_json)
        succession = penstock.CheckpointStore(path).succession()
    else:
        with progress_bar("verifying", hidden=as_json) as update:
            results = [penstock.verify(path, progress=update, signed_by=signed_by)]
    ok = all(result.ok for result in results)
    if as_json:
        print_json(
            {
                "path": path,
                "ok": ok,
                "bytes_checked": sum(result.bytes_checked for result in results),
                "checkpoints": [dataclasses.asdict(result) for result in results],
                "incomplete": [str(step) for step in incomplete],
                "succession": [row._asdict() for row in succession],
            }
        )
    else:
        _print(results, incomplete)
        _print_breaks(succession)
    return 0 if ok else 1


def _explain(path: str, identities: tuple[str, ...], *, as_json: bool) -> int:
    if is_store(path):
        raise click.UsageError("--explain takes a checkpoint, not a store of them")
    with progress_bar("explaining", hidden=as_json) as update:
        explained = penstock.explain(path, identities=identities or None, progress=update)
    if as_json:
        print_json(explain.as_json(explained))
    else:
        explain.show(explained)
    return 0 if explained.ok else 1


def _verify_store(
    root: str, signed_by: Signers | None, *, hidden: bool
) -> tuple[list[penstock.reports.VerifyResult], list[str]]:
    """Results of steps that should be checkpoints, and paths of unfinished ones."""
    store = penstock.CheckpointStore(root)
    results, incomplete = [], []
    for info in store.scan():
        if info.state == "incomplete":
            incomplete.append(store.path(info.step))
        else:
            results.append(_verify_step(store, info, signed_by, hidden=hidden))
    if not results:
        raise penstock.errors.CheckpointNotFoundError(
            f"{root}: none of the {len(incomplete)} steps of this store was ever finished, so "
            "there is nothing to verify",
            path=root,
        )
    return results, incomplete


def _verify_step(
    store: penstock.CheckpointStore, info: StepInfo, signed_by: Signers | None, *, hidden: bool
) -> penstock.reports.VerifyResult:
    try:
        with progress_bar(f"step {info.step}", hidden=hidden) as update:
            return store.verify(info.step, progress=update, signed_by=signed_by)
    except penstock.PenstockError as error:
        # One unreadable step must not keep the others from being checked.
        problem = penstock.reports.Problem(file=None, offset=None, tensor=None, message=str(error))
        return penstock.reports.VerifyResult(
            path=store.path(info.step),
            ok=False,
            problems=(problem,),
            bytes_checked=0,
            files=0,
            tensors=0,
            seconds=0.0,
        )


def _print(results: list[penstock.reports.VerifyResult], incomplete: list[str]) -> None:
    out = console()
    rows = table("checkpoint", "result", "checked", numbers=["checked"], folded=["checkpoint"])
    for result in results:
        count = len(result.problems)
        good = "good, partial" if result.is_partial else "good"
        if result.signer is not None:
            good += f", signed by {result.signer}"
        verdict = good if result.ok else f"{count} problem{'s'[: count != 1]}"
        style = "" if result.ok else "red"
        rows.add_row(result.path, verdict, size(result.bytes_checked), style=style)
    for path in incomplete:
        rows.add_row(path, "never finished", "", style="yellow")
    out.print(rows)
    for result in results:
        if result.problems:
            out.print("", f"problems in {result.path}", sep="\n")
            _print_problems(result)


def _print_breaks(succession: list[Succession]) -> None:
    """Prints the steps that do not follow the step before."""
    for before, row in itertools.pairwise(succession):
        if row.state == "gap":
            count = row.previous.index(before.checkpoint_id)
            text = f"follows step {before.step}; {count} between were deleted or failed"
            console().print(f"step {row.step} {text}", style="dim")
        elif row.state == "breaks":
            text = (
                f"does not list step {before.step} among the checkpoints before it: one of the two "
                "was replaced, or another run saved it"
            )
            console().print(f"step {row.step} {text}", style="yellow", soft_wrap=True)


def _print_problems(result: penstock.reports.VerifyResult) -> None:
    """Prints a table for each file, or a line for one that is gone or unreadable."""
    out = console()
    shown = result.problems[:PROBLEMS_MAX]
    names = FileNames.beside_all(
        result.path, (text for one in shown for text in (one.file, one.message) if text)
    )
    by_file: dict[str | None, list[penstock.reports.Problem]] = {}
    for problem in shown:
        by_file.setdefault(problem.file, []).append(problem)
    for file, problems in by_file.items():
        name = "" if file is None else names.short(file)
        if all(one.offset is None and one.tensor is None for one in problems):
            for one in problems:
                message = names.short(one.message)
                out.print(f"{name}: {message}" if name else message, soft_wrap=True)
            continue
        rows = table(
            "offset", "tensor", "problem", numbers=["offset"], folded=["tensor", "problem"]
        )
        for one in problems:
            offset = "" if one.offset is None else str(one.offset)
            rows.add_row(offset, one.tensor, names.short(one.message))
        out.print(*filter(None, [name]), rows, sep="\n")
    if len(result.problems) > len(shown):
        out.print(f"and {len(result.problems) - len(shown):,} more; --json lists all", style="dim")
