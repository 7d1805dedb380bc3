"""The command behind `make release`."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
from pathlib import Path

import click
from rich.filesize import decimal

from release import checks, source, wheel
from release.command import ReleaseError, output

ROOT = Path(__file__).resolve().parent.parent
_WORK = ROOT / ".cache" / "release"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--target",
    "targets",
    multiple=True,
    type=click.Choice(wheel.TARGETS),
    default=wheel.TARGETS,
    help="Only for this machine type; may be given more than once.",
)
@click.option(
    "--output",
    "dist",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT / "dist",
    help="Where the files go; what is there is removed. [dist]",
)
def main(targets: tuple[str, ...], dist: Path) -> None:
    """Build wheels and source distribution of the last commit, and check them. Publish nothing."""
    try:
        wheel.require_targets(targets)
        _release(targets, dist.resolve())
    except ReleaseError as error:
        raise click.ClickException(str(error)) from error


def _release(targets: tuple[str, ...], dist: Path) -> None:
    notes = []
    if output("git", "-C", ROOT, "status", "--porcelain"):
        notes.append("what is not committed is not in it")
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    # Packing tools take this time for all files, so the same commit packs to the same bytes.
    os.environ["SOURCE_DATE_EPOCH"] = output("git", "-C", ROOT, "log", "-1", "--format=%ct").strip()
    source.export(ROOT, _WORK / "tree")
    sdist = source.pack(_WORK / "tree", dist)
    # Building the wheels from the source distribution shows that it lacks no file.
    tree = source.unpack(sdist, _WORK / "sdist")
    if "Project-URL" not in (tree / "PKG-INFO").read_text():
        notes.append(
            "pyproject.toml has no [project.urls]: no link to the repository, and those of the "
            'README are plain text; add Source = "https://…"'
        )
    rows = [(sdist, "builds the wheels below")]
    for target in targets:
        made = wheel.build(tree, target, dist, _WORK / "target")
        tables = wheel.split(made, dist / "debug")
        rows += [
            (made, f"{checks.check_module(made, tables)} by its symbols"),
            (tables, "debug tables of the above"),
        ]
    made = wheel.build_benchmarks(_WORK / "tree", dist)
    rows.append((made, "the benchmarks"))
    checks.check_metadata([sdist, *dist.glob("*.whl")])
    for made in dist.glob(f"*_{platform.machine()}.whl"):
        checks.check_installed(made, _WORK / "installed", ROOT / "requirements/demo.txt")
    _show(rows, dist, notes)


def _show(rows: list[tuple[Path, str]], dist: Path, notes: list[str]) -> None:
    click.echo()
    for path, what in rows:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        click.echo(f"{path.relative_to(dist)}\n  {decimal(path.stat().st_size)}, {what}")
        click.echo(f"  sha256:{digest}")
    for note in notes:
        click.echo(f"note: {note}")


if __name__ == "__main__":
    main()
