"""Sequential writes and reads by fio, with one and with several processes."""

from __future__ import annotations

import shutil

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import (
    parameter,
    performance_function,
    run_after,
    run_before,
    sanity_function,
    variable,
)

from .storage import StorageCheck


@rfm.simple_test
class FioCheck(StorageCheck):
    """Large requests, past the page cache, many in flight; written data is verified."""

    descr = "sequential writes and reads by fio"
    tags = {"fio"}

    mode = parameter(["write", "read"], loggable=True)

    size = variable(str, value="1G", loggable=True)
    """Bytes that each process writes or reads."""

    block = variable(str, value="1M", loggable=True)
    depth = variable(int, value=16, loggable=True)
    direct = variable(int, value=1, loggable=True)
    """0 uses the page cache, which is all that tmpfs supports."""

    engine = variable(str, value="libaio", loggable=True)
    """io_uring also works, if the kernel and its policy allow it."""

    fio = variable(str, value="fio")

    @run_after("init")
    def name_it(self) -> None:
        """Sets the name in references, as in ``fio-write-1x4``."""
        self.name_of_kind = f"fio-{self.mode}"
        self.tags |= {self.mode}

    @run_after("setup")
    def skip_without_fio(self) -> None:
        """Skips where this node lacks fio; other nodes are not asked."""
        is_local = self.current_partition.scheduler.registered_name == "local"
        self.skip_if(
            is_local and shutil.which(self.fio) is None,
            f"{self.fio} is not on PATH: install it (Debian, Ubuntu: apt-get install fio)",
        )

    @run_before("run")
    def say_what(self) -> None:
        """Sets fio's options; runs before the base class puts the program in front."""
        self.executable_opts = [
            *self.executable_opts,
            f"--fio={self.fio}",
            f"--mode={self.mode}",
            f"--size={self.size}",
            f"--block={self.block}",
            f"--depth={self.depth}",
            f"--direct={self.direct}",
            f"--engine={self.engine}",
        ]

    @sanity_function
    def everything_was_moved_and_is_right(self) -> bool:
        """Checks that there are figures, no error, and every block as it was written."""
        return self.is_sound(self.mode)

    @performance_function("GB/s")
    def rate(self) -> float:
        """Rate of all processes; for writes the time includes the sync."""
        return self.per_second(self.mode, 1e9)

    @performance_function("1/s")
    def iops(self) -> float:
        """Completed requests per second."""
        found = sn.evaluate(self.nodes())
        seconds = max(one["phases"][self.mode]["seconds"] for one in found)
        return sum(one["requests"] for one in found) / seconds

    @performance_function("us")
    def p99(self) -> float:
        """99th percentile of latency, on the slowest node."""
        return max(one["p99_us"] for one in sn.evaluate(self.nodes()))
