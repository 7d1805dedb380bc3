"""The command line of Penstock in the process of a test.

A process of its own takes a fifth of a second to import what commands need. Tests of a terminal, of
signals and of the start of a program begin one all the same.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from unittest import mock

import pytest

from penstock import cli


def run_command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``penstock ARGUMENTS`` through its entry point; returns exit code and output.

    Args:
        arguments: Arguments of the command.
        environment: Variables that only this command has.
    """
    out, errors = io.StringIO(), io.StringIO()
    command = ["penstock", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    return subprocess.CompletedProcess(command, ended.value.code, out.getvalue(), errors.getvalue())
