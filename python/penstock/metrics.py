"""Counters and histograms of saves, loads and checks for Prometheus; see docs/metrics.md.

They belong to the standard client library: any server of its registry also serves them.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.loading.load import Loaded
from penstock.checkpoint.saving.pending import PendingSave
from penstock.common import events
from penstock.common.paths import local
from penstock.errors import MissingDependencyError, PenstockError, result_of
from penstock.reports import MirrorReport, SaveReport, ScrubReport, VerifyResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.registry import Collector

    from penstock.common.events import CallKind, SaveInterval
    from penstock.reports import LoadReport

__all__ = ["enable", "write_textfile"]

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600)
_STALL_SECONDS = (0.001, 0.005, 0.01, 0.05, *_SECONDS)
"""Bounds of the stall histogram's buckets: a lazy save stalls training for milliseconds only."""

_SAVE_RESULTS = ("ok", "failed", "cancelled", "skipped")
_LOAD_RESULTS = ("ok", "missing", "damaged", "failed", "cancelled")
_CHECK_RESULTS = ("ok", "damaged", "failed", "cancelled")
_READING = ("load", "verify", "scrub")
_MIRROR_RESULTS = ("ok", "damaged", "failed")
_REASONS = ("given", "first", "best", "durable", "bound")
_FALLBACKS = ("engine", "buffered", "step", "copy")

_STATES = {"verified": "ok", "damaged": "damaged", "failed": "failed"}
"""Results of a check by the states of `ScrubbedStep`."""


def enable(registry: CollectorRegistry | None = None) -> None:
    """Counts every save, load and check of this process from now on.

    Call it once before training. Later calls do nothing, or add the same metrics to another
    registry. In the multiprocess mode of the client library (``PROMETHEUS_MULTIPROC_DIR``) the
    metrics of all processes of a machine are added up.

    Args:
        registry: The registry of the metrics; None for the default one, which
            `prometheus_client.start_http_server` serves.

    Raises:
        MissingDependencyError: The package prometheus-client is not installed.

    Example:
        >>> import numpy as np, penstock, tempfile
        >>> from prometheus_client import CollectorRegistry
        >>> registry = CollectorRegistry()
        >>> penstock.metrics.enable(registry)
        >>> report = penstock.save(tempfile.mkdtemp() + "/ckpt", {"w": np.ones(3)}, step=7)
        >>> registry.get_sample_value("penstock_last_saved_step")
        7.0
    """
    global _metrics
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingDependencyError(
            "metrics take the package prometheus-client: pip install 'penstock[metrics]'",
            name="prometheus_client",
        ) from error
    if _metrics is None:
        _metrics = _Metrics()
    wanted = prometheus_client.REGISTRY if registry is None else registry
    if wanted not in _registries:
        _metrics.register(wanted)
        _registries.append(wanted)
    events.observe(_metrics)


def write_textfile(path: str | os.PathLike[str]) -> None:
    """Writes Penstock's metrics for the textfile collector of node_exporter.

    The file is replaced atomically. It omits the other metrics of the registry, because
    node_exporter uses the same names for metrics of its own. In multiprocess mode the file covers
    all processes.

    Args:
        path: A file whose name ends in ``.prom``, in the collector's directory.

    Raises:
        PenstockError: `enable` was not called.
        OSError: The file cannot be written.

    Example:
        >>> import penstock
        >>> from prometheus_client import CollectorRegistry
        >>> penstock.metrics.enable(CollectorRegistry())
        >>> penstock.metrics.write_textfile("penstock.prom")
        >>> "penstock_saves_total" in open("penstock.prom").read()
        True
    """
    where = local(os.fspath(path))
    if _metrics is None:
        raise PenstockError("there are no metrics yet: call penstock.metrics.enable() first")
    from prometheus_client import CollectorRegistry, multiprocess, write_to_textfile

    own = CollectorRegistry()
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        everything = multiprocess.MultiProcessCollector(None)  # type: ignore[no-untyped-call]
        own.register(_Ours(everything))
    else:
        _metrics.register(own)
    write_to_textfile(where, own)


class _Ours:
    """Selects Penstock's metrics from another collector."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics."""
        return (one for one in self._collector.collect() if one.name.startswith("penstock_"))


class _Metrics:
    """The metrics, updated by the events of calls."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.collectors: list[Collector] = []

        def counter(name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
            made = Counter(f"penstock_{name}", text, [label] if label else [], registry=None)
            self.collectors.append(made)
            # A label is created at once: a rate over a series that does not exist yet misses its
            # first event.
            for value in values:
                made.labels(value)
            return made

        def gauge(name: str, text: str, mode: Any, label: str = "") -> Gauge:
            labels = [label] if label else []
            made = Gauge(f"penstock_{name}", text, labels, registry=None, multiprocess_mode=mode)
            self.collectors.append(made)
            return made

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            made = Histogram(f"penstock_{name}", text, registry=None, buckets=buckets)
            self.collectors.append(made)
            return made

        self.written = counter("written_bytes", "Bytes of the files of saves that succeeded.")
        self.read = counter("read_bytes", "Bytes read from storage.", "call", _READING)
        self.zero_copy = counter(
            "zero_copy_bytes", "Bytes that saves have written from tensors without a copy."
        )
        self.sealed = counter("sealed_bytes", "Bytes that saves that succeeded have sealed.")
        self.opened = counter("opened_bytes", "Sealed bytes that loads have opened.")
        self.saves = counter("saves", "Saves by how they ended.", "result", _SAVE_RESULTS)
        self.loads = counter("loads", "Checkpoints loaded by result.", "result", _LOAD_RESULTS)
        self.checks = counter("checks", "Checkpoints read back whole.", "result", _CHECK_RESULTS)
        self.damage = counter("damage_found", "Damaged places found.", "call", _READING)
        self.fallbacks = counter("fallbacks", "Ways that were not open.", "kind", _FALLBACKS)
        self.save_seconds = histogram("save_seconds", "Time of a save until it is durable.")
        self.load_seconds = histogram("load_seconds", "Time of a load.")
        text = "Steps copied to a mirror, and attempts to."
        self.mirrors = counter("mirrors", text, "result", _MIRROR_RESULTS)
        self.sent = counter("mirrored_bytes", "Bytes sent to mirrors by copies that succeeded.")
        self.mirror_seconds = histogram("mirror_seconds", "Time of the copying of a step.")
        text = "When the last step came to be at a mirror, in seconds since 1970; 0 before."
        self.mirrored_at = gauge("last_mirror_timestamp_seconds", text, "mostrecent")
        text = "Time that a save kept its caller from training."
        self.stall_seconds = histogram("save_stall_seconds", text, _STALL_SECONDS)
        self.pending_saves = gauge("pending_saves", "Saves in the background.", "livesum")
        text = "When the last save succeeded, in seconds since 1970; 0 before the first."
        self.saved_at = gauge("last_save_timestamp_seconds", text, "mostrecent")
        self.saved_step = gauge("last_saved_step", "Step of the last save.", "mostrecent")
        text = "Steps between two saves, as save_every has them now; 0 without it."
        self.interval_steps = gauge("save_interval_steps", text, "mostrecent")
        text = "Time of these steps; 0 before it is measured."
        self.interval_seconds = gauge("save_interval_seconds", text, "mostrecent")
        text = "Why: 1 for the reason of the interval, 0 for the others."
        self.interval_reason = gauge("save_interval_reason", text, "mostrecent", "reason")
        for reason in _REASONS:
            self.interval_reason.labels(reason)
        text = "Training time that a save takes, as the interval counts it; 0 before."
        self.save_cost = gauge("save_cost_seconds", text, "mostrecent")
        text = "Mean time between failures, as the interval counts it; 0 before."
        self.failure_seconds = gauge("failure_interval_seconds", text, "mostrecent")

    def register(self, registry: CollectorRegistry) -> None:
        """Puts the metrics into a registry."""
        for one in self.collectors:
            registry.register(one)

    # Methods of `events.Observer`.

    def ended(self, call: CallKind, outcome: Any, seconds: float) -> None:
        """Counts a call."""
        if call == "save":
            self._saved(outcome, seconds)
        elif call == "load":
            self._loaded(outcome)
        elif isinstance(outcome, VerifyResult):
            self._checked("ok" if outcome.ok else "damaged")
            self._read("verify", outcome.bytes_checked, len(outcome.problems))
        elif isinstance(outcome, ScrubReport):
            for step in outcome.steps:
                if step.state in _STATES:
                    self._checked(_STATES[step.state])
                # The scrub does not list problems of the manifest, nor damage found earlier.
                problems = len(step.problems) or int(step.state == "damaged")
                self._read("scrub", step.bytes_checked, problems)
        else:
            # Damage is part of these calls' results; a call that raises has reached no verdict.
            self._checked(_result_of(outcome, ("cancelled",)))

    def pending(self, change: int) -> None:
        """Counts saves in the background."""
        self.pending_saves.inc(change)

    def mirrored(self, outcome: Any, seconds: float) -> None:
        """Counts the copying of a step to a mirror."""
        if not isinstance(outcome, MirrorReport):
            self.mirrors.labels(_result_of(outcome, _MIRROR_RESULTS)).inc()
            return
        self.mirrors.labels("ok").inc()
        self.sent.inc(outcome.sent_bytes)
        self.mirror_seconds.observe(seconds)
        self.mirrored_at.set(time.time())

    def passed_over(self, steps: int) -> None:
        """Counts steps that a load skipped as bad."""
        self.fallbacks.labels("step").inc(steps)

    def paced(self, interval: SaveInterval) -> None:
        """Sets the interval between saves."""
        self.interval_steps.set(interval.steps)
        self.interval_seconds.set(interval.seconds or 0)
        self.save_cost.set(interval.cost_seconds or 0)
        self.failure_seconds.set(interval.failure_seconds or 0)
        for reason in _REASONS:
            self.interval_reason.labels(reason).set(reason == interval.reason)

    def _saved(self, outcome: Any, seconds: float) -> None:
        if isinstance(outcome, PendingSave):
            # The saving thread reports the rest.
            self.stall_seconds.observe(outcome.stall_seconds)
            return
        if not isinstance(outcome, SaveReport):
            result = "skipped" if outcome is None else _result_of(outcome, _SAVE_RESULTS)
            self.saves.labels(result).inc()
            return
        self.saves.labels("ok").inc()
        self.written.inc(outcome.bytes)
        self.zero_copy.inc(outcome.zero_copy_bytes)
        self.sealed.inc(outcome.sealed_bytes)
        self.save_seconds.observe(outcome.seconds)
        if seconds:
            self.stall_seconds.observe(seconds)
        self.saved_at.set(time.time())
        if outcome.step is not None:
            self.saved_step.set(outcome.step)
        self._fell_back(outcome)

    def _loaded(self, outcome: Any) -> None:
        if not isinstance(outcome, Loaded):
            result = _result_of(outcome, _LOAD_RESULTS)
            self.loads.labels(result).inc()
            self.damage.labels("load").inc(result == "damaged")
            return
        self.loads.labels("ok").inc()
        self._read("load", outcome.report.bytes_read)
        self.opened.inc(outcome.report.opened_bytes)
        self.load_seconds.observe(outcome.report.seconds)
        self._fell_back(outcome.report)

    def _checked(self, result: str) -> None:
        self.checks.labels(result).inc()

    def _read(self, call: CallKind, nbytes: int, problems: int = 0) -> None:
        self.read.labels(call).inc(nbytes)
        self.damage.labels(call).inc(problems)

    def _fell_back(self, report: SaveReport | LoadReport) -> None:
        kinds = {fallback.kind for fallback in report.fallbacks}
        for kind in kinds.intersection(_FALLBACKS):
            self.fallbacks.labels(kind).inc()


def _result_of(error: BaseException, results: Iterable[str]) -> str:
    """Returns the result label of a call that raised, among the labels of calls of its kind."""
    result = result_of(error) if isinstance(error, PenstockError) else "failed"
    # Handlers of SIGTERM exit: a job that is preempted is not a failure.
    if isinstance(error, KeyboardInterrupt | SystemExit):
        result = "cancelled"
    return result if result in results else "failed"


_metrics: _Metrics | None = None
_registries: list[CollectorRegistry] = []
"""Registries that hold the metrics."""
