"""Base of all storage checks: working directory, number of nodes, and references."""

from __future__ import annotations

import json
import os
import sys
import time

import reframe as rfm
import reframe.utility.sanity as sn
from reframe.core.builtins import deferrable, parameter, run_after, run_before, variable


class StorageCheck(rfm.RunOnlyRegressionTest):
    """A program that runs once on each node and prints its results as a line of JSON.

    Several nodes need a scheduler that starts the program on each, and a directory that all of them
    see, where they also wait for each other.
    """

    directory = variable(str, value=".", loggable=True)
    """Directory for the files, as in ``-S directory=/scratch``; relative to ReFrame's start."""

    python = variable(str, value=sys.executable)
    """Interpreter on the nodes, with Penstock installed."""

    num_nodes = parameter([1, 2, 4])
    processes = parameter([1, 4], loggable=True)

    name_of_kind = variable(str)
    """Name of the check in references, before the numbers of nodes and processes."""

    valid_systems = ["*"]
    valid_prog_environs = ["*"]
    time_limit = "20m"
    num_tasks_per_node = 1

    @property
    def reference_name(self) -> str:
        """Name of this variant in ``references``, in the `extras` of a partition."""
        return f"{self.name_of_kind}-{self.num_nodes}x{self.processes}"

    @run_after("init")
    def ask_for_nodes(self) -> None:
        """Requests one task on each node, which starts the processes itself."""
        # Later hooks run in the directory of the check.
        self.directory = os.path.abspath(self.directory)
        self.num_tasks = self.num_nodes
        self.num_cpus_per_task = self.processes

    @run_after("setup")
    def skip_without_scheduler(self) -> None:
        """Skips variants of several nodes on a partition without a scheduler."""
        is_local = self.current_partition.scheduler.registered_name == "local"
        self.skip_if(
            is_local and self.num_nodes > 1,
            f"{self.num_nodes} nodes take a scheduler: "
            f"{self.current_partition.fullname} has none (see settings.py)",
        )

    @run_after("setup")
    def take_references(self) -> None:
        """Takes this variant's expected figures from the partition."""
        expected = self.current_partition.extras.get("references", {})
        if self.reference_name in expected:
            self.reference = {self.current_partition.fullname: expected[self.reference_name]}

    @run_before("run")
    def work_in_a_directory_of_its_own(self) -> None:
        """Creates a directory for the job, removed at its end, also when the job is stopped."""
        name = f"penstock-reframe-{self.reference_name}-{os.getpid()}-{time.time_ns()}"
        work = os.path.join(self.directory, name)
        self.prerun_cmds = [
            f"mkdir -p '{work}' || exit 1",
            f"trap \"rm -rf -- '{work}'\" EXIT",
            "trap 'exit 143' TERM",
        ]
        self.executable = self.python
        self.executable_opts = [
            f"{self.name_of_kind.partition('-')[0]}.py",
            f"--work='{work}'",
            f"--processes={self.processes}",
            *self.executable_opts,
        ]

    @deferrable
    def nodes(self) -> list[dict]:
        """Returns the results of each node."""
        return sn.evaluate(sn.extractall(r"^(\{.*\})$", self.stdout, 1, json.loads))

    @deferrable
    def per_second(self, phase: str, unit: float = 1) -> float:
        """Rate of all nodes together, over the time of the slowest."""
        found = [one["phases"][phase] for one in sn.evaluate(self.nodes())]
        return sum(one["count"] for one in found) / max(one["seconds"] for one in found) / unit

    @deferrable
    def is_sound(self, *phases: str) -> bool:
        """Checks that every node has reported, and that all items were right."""
        nodes = sn.evaluate(self.nodes())
        sn.evaluate(sn.assert_eq(self.job.exitcode, 0, "the program failed, see its stderr"))
        sn.evaluate(sn.assert_eq(len(nodes), self.num_nodes, "nodes answered: {0}, not {1}"))
        for one in nodes:
            for phase in phases:
                done = one["phases"][phase]
                sn.evaluate(sn.assert_gt(done["count"], 0, f"{phase}: nothing was done"))
                sn.evaluate(sn.assert_gt(done["seconds"], 0, f"{phase}: it took no time"))
            told = f"{{0}} of {{1}} were checked: {one['verified_unit']}"
            sn.evaluate(sn.assert_eq(one["verified"], one["to_verify"], told))
        return True
