"""The command `penstock`: looks at checkpoints and shows that they hold what they promise.

Built on the public API alone. Every command that prints a result takes `--json`, which puts one
JSON object on standard output and nothing else; its keys are listed in the help of the command
and are only ever added to.

A command is a module of its name, imported when it is asked for (`LazyGroup`), and a line in the
list of its group: `penstock --help` waits for none of them.

Exit codes: 0 fine, 1 a check failed or an operation did, 2 the command line is wrong, 130 ended
by Ctrl-C. Errors go to standard error as one message.
"""

from __future__ import annotations

import io
import os
import sys

import click

import penstock
from penstock.cli.examples import example
from penstock.cli.group import LazyGroup

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


@click.group(
    cls=LazyGroup,
    apart={"bench": ("penstock_bench.cli.bench", "bench")},
    helps={
        "bench": "Measure storage, and compare what was measured.",
        "convert": "Save the checkpoint SRC of another library anew, as DST.",
        "deepspeed": "Run COMMAND with DeepSpeed's ops async_io, gds and pin_memory replaced.",
        "demo": "Train, kill a save in the middle, resume bit for bit.",
        "diff": "Compare the checkpoints A and B; of a store, its newest complete step.",
        "doctor": "Look at this machine and at DIRECTORY before a run.",
        "export": "Make a directory of the model in PATH that from_pretrained and others load.",
        "generate": "Go on from a prompt by MODEL, of whose weights --memory is held.",
        "import": "Make the checkpoint PATH of the safetensors files in DIRECTORY, by links.",
        "inspect": "Show what is in the checkpoint PATH; of a store, in its newest complete step.",
        "ls": "List the steps of the store ROOT, complete or not.",
        "mirror": "Copy the complete steps of the store ROOT to URL in a bucket, as far as they "
        "are not there.",
        "salvage": "Save the intact tensors of the damaged checkpoint PATH, and its plain values, "
        "to OUT.",
        "scrub": "Read back the steps of the store ROOT that were not read for long.",
        "set-aside": "Set the damaged step STEP of the store ROOT aside.",
        "sweep": "Remove what saves that died left behind in the store ROOT.",
        "trace": "Sum up traces of PENSTOCK_TRACE=FILE, or of penstock.trace(file).",
        "verify": "Read every byte of PATH and compare it with its digest.",
    },
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=example(
        "penstock ls /checkpoints",
        "penstock verify --help",
        after="Exit codes: 0 fine, 1 a check or an operation failed, 2 wrong command line.",
    ),
)
@click.version_option(package_name="penstock", prog_name="penstock")
def cli() -> None:
    """Look at checkpoints, check them, and see one survive a kill.

    A checkpoint is a directory that penstock.save has made. A store is a directory of checkpoints,
    one for each training step.
    """
    try:
        penstock.Options()
    except ValueError as error:
        # A wrong PENSTOCK_* variable, better refused here than in the middle of a command.
        raise click.UsageError(str(error)) from None


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
    # It takes what prints tables, which the help does without.
    from penstock.common.console import escaped

    # Unlike Rich, click does not ask for it.
    has_colour = False if os.environ.get("NO_COLOR") else None
    click.secho("error: ", fg="red", bold=True, err=True, nl=False, color=has_colour)
    click.echo(escaped(message), err=True)
    return EXIT_FAILED
