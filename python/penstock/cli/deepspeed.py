"""`penstock deepspeed`: runs a program with DeepSpeed's tensor I/O on Penstock."""

from __future__ import annotations

import os

import click

from penstock.cli.examples import example

_EXAMPLE = "penstock deepspeed -- deepspeed train.py --deepspeed_config config.json"


@click.command(
    epilog=example(_EXAMPLE),
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--strict/--lenient",
    default=True,
    show_default=True,
    help="Raise errors, or return what DeepSpeed's own ops would.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def deepspeed(strict: bool, command: tuple[str, ...]) -> None:
    """Run COMMAND with DeepSpeed's ops async_io, gds and pin_memory replaced.

    The program, and every one that it starts, moves its tensors with penstock.offload.
    """
    from penstock.integrations.deepspeed import environment

    try:
        os.execvpe(command[0], command, environment(os.environ, strict=strict))
    except OSError as error:
        raise click.ClickException(f"{command[0]} cannot be run: {error.strerror}") from error
    except ValueError as error:
        raise click.UsageError("the name of COMMAND is empty") from error
