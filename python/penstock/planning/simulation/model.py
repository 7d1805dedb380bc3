"""Clusters and jobs of a simulation, as TOML files describe them.

A file has a table ``[cluster]`` and a table ``[job]``; docs/planning.md lists their keys. Sizes and
times may be numbers, in bytes and seconds, or text with units: ``"4.3TiB"``, ``"2.7h"``.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.planning.models.failures import SECONDS_PER_DAY
from penstock.planning.models.units import byte_count, bytes_per_second, seconds
from penstock.planning.simulation.sharing import Flow, finish_times

if TYPE_CHECKING:
    from collections.abc import Callable

_KINDS: dict[str, Callable[[Any, str], float]] = {
    "seconds": seconds,
    "bytes": byte_count,
    "rate": bytes_per_second,
}


def _field(kind: str, default: Any) -> Any:
    return field(default=default, metadata={"kind": kind})


@dataclass(frozen=True)
class ClusterModel:
    """The machines.

    Attributes:
        nodes: Number of nodes.
        failures_per_1000_node_days: Failure rate of a node.
        weibull_shape: Shape of the times between failures; 1 is exponential.
        host_loss_share: Share of failures after which the host's own storage is gone.
        spares: Nodes that stand by; 0 with `repair_seconds` 0 means that there is always one.
        repair_seconds: Time until a failed node is a spare, once its repair begins.
        repair_crews: Nodes that are repaired at the same time; 0 for all.
        drive_write: Bytes per second that a node's drives write.
        drive_read: Bytes per second that they read.
        link: Bytes per second of a node's network.
        shared_write: Bytes per second that the shared file system, or bucket, takes from all.
        shared_read: Bytes per second that it gives to all.
    """

    nodes: int = 1
    failures_per_1000_node_days: float = 4.0
    weibull_shape: float = 1.0
    host_loss_share: float = 1.0
    spares: int = 0
    repair_seconds: float = _field("seconds", 0.0)
    repair_crews: int = 0
    drive_write: float = _field("rate", math.inf)
    drive_read: float = _field("rate", math.inf)
    link: float = _field("rate", math.inf)
    shared_write: float = _field("rate", math.inf)
    shared_read: float = _field("rate", math.inf)

    @property
    def mtbf_seconds(self) -> float:
        """Mean seconds between failures of all nodes; inf without failures."""
        rate = self.nodes * self.failures_per_1000_node_days
        return 1000 * SECONDS_PER_DAY / rate if rate else math.inf


@dataclass(frozen=True)
class JobModel:
    """One training job.

    Attributes:
        name: Name in tables, of one of several jobs.
        nodes: Nodes that it runs on; 0 for all.
        nodes_min: Fewest nodes that it restarts on if there is no spare one; 0 to wait for one.
        reshard_seconds: Further time of a restart on another number of nodes than before.
        checkpoint_bytes: Bytes of a checkpoint.
        writers: Nodes that write it; 0 for all.
        to: ``local`` drives, the ``shared`` file system, or ``neighbour``: local drives and those
            of another node.
        mirror: Also copy each checkpoint to shared storage, in the background, the newest first.
        save_seconds: Time of a save, instead of one from bytes and rates; 0 for none given.
        stall_seconds: Time for which an asynchronous save stops training. Left out (-1), saves are
            synchronous and stop it until they are durable.
        slowdown: Share of its speed that training loses beside a save.
        interval_seconds: Time from the start of one save to the start of the next; 0 for the best.
        detection_seconds: Time from a failure until the restart begins.
        start_seconds: Time to start the job, without loading the checkpoint.
    """

    name: str = ""
    nodes: int = 0
    nodes_min: int = 0
    reshard_seconds: float = _field("seconds", 0.0)
    checkpoint_bytes: float = _field("bytes", 0.0)
    writers: int = 0
    to: str = "shared"
    mirror: bool = False
    save_seconds: float = _field("seconds", 0.0)
    stall_seconds: float = _field("seconds", -1.0)
    slowdown: float = 0.0
    interval_seconds: float = _field("seconds", 0.0)
    detection_seconds: float = _field("seconds", 60.0)
    start_seconds: float = _field("seconds", 300.0)


@dataclass(frozen=True)
class Scenario:
    """A cluster and the jobs that it runs.

    Attributes:
        name: Name in tables and in errors.
        cluster: The machines.
        job: The job, or the values that all of `jobs` have.
        source: Publication that the numbers are from.
        jobs: Jobs that share the cluster; empty for the one.
        policies: Values to compare, by the name of their row.
        row: Name in a table of one scenario with other values each; empty for `name`.
    """

    name: str
    cluster: ClusterModel
    job: JobModel
    source: str = ""
    jobs: tuple[JobModel, ...] = ()
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    row: str = ""

    @property
    def needs_events(self) -> bool:
        """Whether jobs wait for each other, or for nodes, as `shared.simulate_jobs` computes."""
        return bool(self.jobs or self.job.nodes or self.job.nodes_min or self.cluster.repair_crews)

    def compared(self) -> list[Scenario]:
        """A scenario for each of the policies, in rows named as they are; itself without any.

        Raises:
            ValueError: A policy has an unknown key or a wrong value; the message names it.
        """
        if not self.policies:
            return [self]
        plain = replace(self, policies={})
        return [
            replace(plain, name=f"{self.name}: policy {name}", row=name).with_values(**values)
            for name, values in self.policies.items()
        ]

    def with_values(self, **changes: Any) -> Scenario:
        """The scenario with other values, by key: ``nodes``, ``interval_seconds``, ….

        ``nodes`` is that of the cluster; a value of a job is changed in all of them, but for their
        names.

        Raises:
            ValueError: There is no such key, or its value is out of range.
        """
        kinds = {"cluster": ClusterModel, "job": JobModel}
        keys = {part: [one.name for one in fields(kind)] for part, kind in kinds.items()}
        keys["job"].remove("name")
        parts: dict[str, dict[str, Any]] = {"cluster": {}, "job": {}}
        for key, value in changes.items():
            part = next((part for part, names in keys.items() if key in names), None)
            if part is None:
                raise ValueError(
                    f"{self.name}: {key}: neither a cluster nor a job has such a key; expected one "
                    f"of {', '.join(chain(*keys.values()))}"
                )
            parts[part][key] = value
        cluster = replace(self.cluster, **_values(ClusterModel, parts["cluster"], self.name))
        values = _values(JobModel, parts["job"], self.name)
        job = replace(self.job, **values)
        jobs = tuple(replace(one, **values) for one in self.jobs)
        return checked(replace(self, cluster=cluster, job=job, jobs=jobs))

    def write_seconds(self) -> float:
        """Time that a save needs until it is durable, from bytes, drives, links and sharing."""
        if self.job.save_seconds > 0:
            return self.job.save_seconds
        return _transfer(self, reads=False, to=self.job.to)

    def read_seconds(self) -> float:
        """Time that a load of all nodes needs, from the place that saves go to."""
        return _transfer(self, reads=True, to=self.job.to)

    def mirror_seconds(self) -> float:
        """Time that a copy to shared storage needs."""
        return _transfer(self, reads=False, to="shared")

    def peak_rate(self) -> float:
        """Bytes per second of all writers together while a save runs."""
        return self.job.checkpoint_bytes / self.write_seconds()


def _transfer(scenario: Scenario, *, reads: bool, to: str) -> float:
    """Seconds for one checkpoint to go to, or come from, its place, with nothing beside it."""
    cluster = scenario.cluster
    nodes = scenario.job.nodes or cluster.nodes
    flow = flow_of(cluster, scenario.job, nodes, reads=reads, to=to)
    if flow is None:
        return 0.0
    shared = cluster.shared_read if reads else cluster.shared_write
    return finish_times([flow], {flow.name: shared})[0]


def flow_of(
    cluster: ClusterModel, job: JobModel, nodes: int, *, reads: bool, to: str
) -> Flow | None:
    """The transfers of one checkpoint by the nodes of a job.

    Their name, ``write`` or ``read``, is that of the shared file system's resource.

    Returns:
        None if it takes no time: nothing is transferred, or nothing limits it.
    """
    if not job.checkpoint_bytes:
        return None
    name = "read" if reads else "write"
    count = nodes if reads else min(nodes, job.writers or nodes)
    drive = cluster.drive_read if reads else cluster.drive_write
    limits = {
        "local": drive,
        "neighbour": min(drive / (1 if reads else 2), cluster.link),
        "shared": cluster.link,
    }
    shared = cluster.shared_read if reads else cluster.shared_write
    through = (name,) if to == "shared" and math.isfinite(shared) else ()
    if not through and not math.isfinite(limits[to]):
        return None
    return Flow(name, job.checkpoint_bytes / count, count, through, limits[to])


def load(path_or_preset: str) -> Scenario:
    """Reads a scenario from a TOML file, or one of the presets by name.

    Raises:
        ValueError: There is no such file or preset, or a key or value in it is wrong.
    """
    path = Path(path_or_preset)
    if path.suffix == ".toml" or path.exists():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
        return parse(text, str(path), path.stem)
    if path_or_preset in presets():
        text = (_PRESETS / f"{path_or_preset}.toml").read_text(encoding="utf-8")
        return parse(text, path_or_preset, path_or_preset)
    raise ValueError(f"{path_or_preset}: neither a file nor a preset; presets are "
                     f"{', '.join(presets())}")  # fmt: skip


_PRESETS = resources.files("penstock.planning.simulation") / "presets"


def presets() -> list[str]:
    """Names of the presets, sorted."""
    names = (one.name for one in _PRESETS.iterdir())
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def parse(text: str, where: str, name: str) -> Scenario:
    """Parses the TOML of a scenario.

    Args:
        text: The file's contents.
        where: The file, for errors.
        name: Name of the scenario, unless the file has one.

    Raises:
        ValueError: It is no TOML, or a key or value in it is wrong.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: {error}") from None
    unknown = set(tables) - {"name", "source", "cluster", "job", "jobs", "policies"}
    if unknown:
        raise ValueError(f"{where}: unknown key {sorted(unknown)[0]!r}; a scenario has name, "
                         "source, [cluster], [job], [[jobs]] and [policies]")  # fmt: skip
    jobs, policies = tables.get("jobs", []), tables.get("policies", {})
    for part in ("cluster", "job"):
        if not isinstance(tables.get(part, {}), dict):
            raise ValueError(f"{where}: {part} is not a table")
    if not (isinstance(jobs, list) and all(isinstance(one, dict) for one in jobs)):
        raise ValueError(f"{where}: jobs is no list of tables: write [[jobs]] before each")
    if not (isinstance(policies, dict) and all(isinstance(one, dict) for one in policies.values())):
        raise ValueError(f"{where}: policies is no table of tables: write [policies.NAME]")
    shared = _values(JobModel, tables.get("job", {}), where)
    made = [JobModel(**{**shared, "name": "", **_values(JobModel, one, where)}) for one in jobs]
    scenario = checked(
        Scenario(
            name=str(tables.get("name", name)),
            cluster=ClusterModel(**_values(ClusterModel, tables.get("cluster", {}), where)),
            job=JobModel(**shared),
            source=str(tables.get("source", "")),
            jobs=tuple(
                replace(one, name=one.name or f"job {number}")
                for number, one in enumerate(made, start=1)
            ),
            policies=policies,
        )
    )
    # A wrong value of a policy is found here, and not after the runs of the ones before it.
    replace(scenario, name=where).compared()
    return scenario


def _values(kind: type, given: dict[str, Any], where: str) -> dict[str, Any]:
    """Converts the values of a table to those of a model."""
    known = {one.name: one for one in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; expected one of {', '.join(known)}")
        unit, default = known[key].metadata.get("kind"), getattr(kind, key)
        if unit is not None:
            values[key] = _KINDS[unit](value, f"{where}: {key}")
        elif isinstance(default, (bool, str)):
            if type(value) is not type(default):
                raise ValueError(f"{where}: {key} = {value!r}: expected a {type(default).__name__}")
            values[key] = value
        else:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or (
                isinstance(default, int) and not (math.isfinite(value) and value == int(value))
            ):
                raise ValueError(f"{where}: {key} = {value!r}: expected a number")
            values[key] = type(default)(value)
    return values


def checked(scenario: Scenario) -> Scenario:
    """Returns the scenario if its values fit together.

    Raises:
        ValueError: A value is out of range; the message names it.
    """
    cluster, where = scenario.cluster, scenario.name
    _check_ranges(
        where,
        ("nodes", cluster.nodes, 1, 1e7),
        ("failures_per_1000_node_days", cluster.failures_per_1000_node_days, 0, 1e6),
        ("weibull_shape", cluster.weibull_shape, 0.2, 10),
        ("host_loss_share", cluster.host_loss_share, 0, 1),
        ("spares", cluster.spares, 0, 1e6),
        ("repair_crews", cluster.repair_crews, 0, 1e6),
    )
    for key in ("drive_write", "drive_read", "link", "shared_write", "shared_read"):
        if not getattr(cluster, key) > 0:
            raise ValueError(f"{where}: {key}: expected more than 0 bytes per second")
    for job in scenario.jobs or (scenario.job,):
        named = f"{where}: {job.name}" if job.name else where
        _check_job(named, cluster, job)
        alone = replace(scenario, job=job, jobs=())
        if alone.write_seconds() < job.stall_seconds:
            raise ValueError(f"{named}: stall_seconds = {job.stall_seconds:g}: longer than a save, "
                             f"{alone.write_seconds():g} s")  # fmt: skip
    names = [job.name for job in scenario.jobs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}: {names.count(name)} jobs have the name {name!r}: give each "
                             "one of its own")  # fmt: skip
    used = sum(job.nodes or cluster.nodes for job in scenario.jobs)
    if used > cluster.nodes:
        raise ValueError(f"{where}: the jobs run on {used} nodes, and the cluster has "
                         f"{cluster.nodes}, without its spares")  # fmt: skip
    return scenario


def _check_job(where: str, cluster: ClusterModel, job: JobModel) -> None:
    """Refuses a job whose values are out of range."""
    _check_ranges(
        where,
        ("nodes", job.nodes, 0, cluster.nodes),
        ("nodes_min", job.nodes_min, 0, job.nodes or cluster.nodes),
        ("writers", job.writers, 0, job.nodes or cluster.nodes),
        ("slowdown", job.slowdown, 0, 1),
    )
    if job.to not in ("local", "neighbour", "shared"):
        raise ValueError(f"{where}: to = {job.to!r}: expected 'local', 'neighbour' or 'shared'")


def _check_ranges(where: str, *ranges: tuple[str, float, float, float]) -> None:
    """Refuses a value outside of its range."""
    for key, value, low, high in ranges:
        if not low <= value <= high:
            raise ValueError(f"{where}: {key} = {value:g}: expected {low:g} to {high:g}")
