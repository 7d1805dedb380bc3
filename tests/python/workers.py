"""Workers of pytest start as forks of a process that has imported PyTorch and the frameworks.

The modules of tests import all of them when tests are collected, in each worker: 11 s of processor
time, which is spent once this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

import forks

if TYPE_CHECKING:
    import execnet
    from execnet.gateway_base import ExecModel


class _Connection(gateway_io.Popen2IOMaster):
    """The pipes of a worker, as execnet has them, and the forked worker behind them."""

    def __init__(self, command: list[str], execmodel: ExecModel) -> None:
        pipe = forks.subprocess.PIPE
        self.popen = forks.WorkerPopen(command, stdin=pipe, stdout=pipe)
        Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)


def pytest_xdist_setupnodes(specs: list[execnet.XSpec]) -> None:
    """Has execnet fork the workers of this machine."""
    start = gateway_io.create_io

    def create(spec: execnet.XSpec, execmodel: ExecModel) -> gateway_io.Popen2IOMaster:
        if spec not in specs or not spec.popen or spec.python:
            return start(spec, execmodel)
        return _Connection(gateway_io.popen_args(spec), execmodel)

    gateway_io.create_io = create
