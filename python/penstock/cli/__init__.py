"""The command `penstock`: looks at checkpoints and shows that they hold what they promise.

Built on the public API alone. Every command that prints a result takes `--json`, which puts one
JSON object on standard output and nothing else; its keys are listed in the help of the command
and are only ever added to.

Exit codes: 0 fine, 1 a check failed or an operation did, 2 the command line is wrong, 130 ended
by Ctrl-C. Errors go to standard error as one message.
"""

from __future__ import annotations

import io
import sys

import click

import penstock
from penstock.cli.bench_checkpoint import bench_checkpoint
from penstock.cli.bench_io import bench
from penstock.cli.demo import demo
from penstock.cli.diff import diff
from penstock.cli.doctor import doctor
from penstock.cli.inspect import inspect
from penstock.cli.ls import ls
from penstock.cli.salvage import salvage
from penstock.cli.scrub import scrub
from penstock.cli.set_aside import set_aside
from penstock.cli.sweep import sweep
from penstock.cli.trace_summary import trace
from penstock.cli.verify import verify
from penstock.console import escaped

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@click.group(
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 fine, 1 a check or an operation failed, 2 wrong command line.",
)
@click.version_option(penstock.__version__, prog_name="penstock")
def cli() -> None:
    """Look at checkpoints, check them, and see one survive a kill."""
    try:
        penstock.Options()
    except ValueError as error:
        # A wrong PENSTOCK_* variable, better refused here than in the middle of a command.
        raise click.UsageError(str(error)) from None


bench.add_command(bench_checkpoint)
for command in (
    bench,
    demo,
    doctor,
    ls,
    inspect,
    verify,
    diff,
    scrub,
    set_aside,
    sweep,
    salvage,
    trace,
):
    cli.add_command(command)


def main() -> None:
    """Runs the command line and exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        # A file name or a key may hold what the terminal's encoding cannot show.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run())


def _run() -> int:
    try:
        # Outside of its standalone mode click hands through what a command returns: its exit
        # code. In it, Ctrl-C would print "Aborted!" and exit with 1.
        return int(cli.main(prog_name="penstock", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return EXIT_INTERRUPTED
    except penstock.PenstockError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    click.secho("error: ", fg="red", bold=True, err=True, nl=False)
    click.echo(escaped(message), err=True)
    return EXIT_FAILED
