"""The command `penstock`: inspects, checks and converts checkpoints.

It uses the public API alone. Every command that prints a result takes `--json`, which prints one
JSON object on standard output and nothing else; the help of the command lists its keys, which are
only ever added to.

A command is a module of its name, imported when it is run (`LazyGroup`), and an entry in its
group's table of helps: `penstock --help` imports none of them.

Exit codes: 0 fine, 1 a check or an operation failed, 2 the command line is wrong, 130 ended by
Ctrl-C. Errors go to standard error as one message.
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
        "bench": "Measure storage, and compare the results.",
        "convert": "Convert the checkpoint SRC of another library to a Penstock checkpoint DST.",
        "deepspeed": "Run COMMAND with DeepSpeed's ops async_io, gds and pin_memory replaced.",
        "demo": "Train, kill a save in the middle, resume bit for bit.",
        "diff": "Compare the checkpoints A and B; of a store, its newest complete step.",
        "doctor": "Check this machine and DIRECTORY before a run.",
        "export": "Export the model in PATH as a directory that from_pretrained and others load.",
        "generate": "Generate text with MODEL, holding --memory bytes of its weights.",
        "import": "Make a checkpoint PATH that links the safetensors files in DIRECTORY.",
        "inspect": "Show what is in the checkpoint PATH; of a store, in its newest complete step.",
        "keys": "Make keys for sealed checkpoints, and say who can open a checkpoint.",
        "ls": "List the steps of the store ROOT, complete or not.",
        "mirror": "Copy complete steps of the store ROOT to URL, a bucket that lacks them.",
        "plan": "Advise how often to save, from the history of the store ROOT and from the "
        "options.",
        "salvage": "Save the intact tensors of the damaged checkpoint PATH, and its plain values, "
        "to OUT.",
        "scrub": "Read back steps of the store ROOT that were not read recently.",
        "quarantine": "Quarantine the damaged step STEP of the store ROOT.",
        "sign": "Sign the checkpoint PATH: read every byte, and vouch for it with the key in FILE.",
        "simulate": "Simulate a cluster and its training job, from a TOML file or a preset.",
        "sweep": "Remove the leftovers of killed saves from the store ROOT.",
        "trace": "Summarize traces of PENSTOCK_TRACE=FILE, or of penstock.trace(file).",
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
    """Inspect, check and move checkpoints; measure storage; plan how often to save.

    A checkpoint is a directory made by penstock.save. A store is a directory of checkpoints, one
    for each training step.
    """
    try:
        penstock.Options()
    except ValueError as error:
        # A wrong PENSTOCK_* variable: refuse it here rather than in the middle of a command.
        raise click.UsageError(str(error)) from None


def main() -> None:
    """Runs the command line and exits with its code."""
    for stream in (sys.stdout, sys.stderr):
        # File names and keys may have characters that the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run())


def _run() -> int:
    try:
        # Outside of its standalone mode click returns a command's exit code. In it, Ctrl-C would
        # print "Aborted!" and exit with 1.
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
    # Imported here, as it imports the library for tables, which helps do not need.
    from penstock.common.console import escaped

    # Unlike Rich, click ignores NO_COLOR.
    has_colour = False if os.environ.get("NO_COLOR") else None
    click.secho("error: ", fg="red", bold=True, err=True, nl=False, color=has_colour)
    click.echo(escaped(message), err=True)
    return EXIT_FAILED
