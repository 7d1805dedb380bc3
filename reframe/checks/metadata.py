"""Many files in trees, in the manner of mdtest."""

from __future__ import annotations

import reframe as rfm
from reframe.core.builtins import performance_function, run_before, sanity_function, variable

from .storage import StorageCheck

PHASES = ("mkdir", "create", "stat", "remove", "rmdir")


@rfm.simple_test
class MetadataCheck(StorageCheck):
    """Directories and empty files made, looked at and removed by all processes, phase by phase.

    Each process has a tree of its own (mdtest's -u) and looks at the files of a neighbour (its -N),
    on another node where there is one, so that no cache of its own answers. The figures are those
    of a small Python program and not to be held against mdtest's.
    """

    descr = "directories and files made, looked at and removed"
    tags = {"metadata"}
    name_of_kind = "metadata"

    files = variable(int, value=2000, loggable=True)
    """Of each process."""

    depth = variable(int, value=2, loggable=True)
    """Levels of directories below that of the process (mdtest's -z)."""

    branching = variable(int, value=4, loggable=True)
    """Directories in each that has any (mdtest's -b)."""

    @run_before("run")
    def say_what(self) -> None:
        """How many of what."""
        self.executable_opts = [
            *self.executable_opts,
            f"--files={self.files}",
            f"--depth={self.depth}",
            f"--branching={self.branching}",
        ]

    @sanity_function
    def every_file_was_there_and_is_gone(self) -> bool:
        """As a walk through the trees sees it."""
        return self.is_sound(*PHASES)

    @performance_function("1/s")
    def mkdir(self) -> float:
        """Directories made."""
        return self.per_second("mkdir")

    @performance_function("1/s")
    def create(self) -> float:
        """Files made, opened and closed."""
        return self.per_second("create")

    @performance_function("1/s")
    def stat(self) -> float:
        """Files looked at."""
        return self.per_second("stat")

    @performance_function("1/s")
    def remove(self) -> float:
        """Files removed."""
        return self.per_second("remove")

    @performance_function("1/s")
    def rmdir(self) -> float:
        """Directories removed."""
        return self.per_second("rmdir")
