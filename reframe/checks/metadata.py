"""Many files in trees, as mdtest does it."""

from __future__ import annotations

import reframe as rfm
from reframe.core.builtins import performance_function, run_before, sanity_function, variable

from .storage import StorageCheck

PHASES = ("mkdir", "create", "stat", "remove", "rmdir")


@rfm.simple_test
class MetadataCheck(StorageCheck):
    """All processes create, stat and remove directories and empty files, phase by phase.

    Each process has its own tree (mdtest's -u) and stats the files of a neighbour (its -N), on
    another node if there is one, so that its own cache does not answer. The figures are those of a
    small Python program, not comparable with mdtest's.
    """

    descr = "directories and files made, looked at and removed"
    tags = {"metadata"}
    name_of_kind = "metadata"

    files = variable(int, value=2000, loggable=True)
    """Number of files that each process creates."""

    depth = variable(int, value=2, loggable=True)
    """Levels of directories below the process's own (mdtest's -z)."""

    branching = variable(int, value=4, loggable=True)
    """Subdirectories of each directory above the last level (mdtest's -b)."""

    @run_before("run")
    def say_what(self) -> None:
        """Passes the counts to the program."""
        self.executable_opts = [
            *self.executable_opts,
            f"--files={self.files}",
            f"--depth={self.depth}",
            f"--branching={self.branching}",
        ]

    @sanity_function
    def every_file_was_there_and_is_gone(self) -> bool:
        """Checks that a walk through the trees found every file, and none after the removal."""
        return self.is_sound(*PHASES)

    @performance_function("1/s")
    def mkdir(self) -> float:
        """Directories created per second."""
        return self.per_second("mkdir")

    @performance_function("1/s")
    def create(self) -> float:
        """Files created, opened and closed per second."""
        return self.per_second("create")

    @performance_function("1/s")
    def stat(self) -> float:
        """Calls of stat per second."""
        return self.per_second("stat")

    @performance_function("1/s")
    def remove(self) -> float:
        """Files removed per second."""
        return self.per_second("remove")

    @performance_function("1/s")
    def rmdir(self) -> float:
        """Directories removed per second."""
        return self.per_second("rmdir")
