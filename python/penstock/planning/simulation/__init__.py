"""Simulates jobs on clusters: failures, saves, mirrors, spares and restarts.

>>> from penstock.planning import simulation
>>> scenario = simulation.load("llama-3-405b")
>>> round(float(simulation.simulate(scenario, runs=200).goodput.mean()), 2)
0.93
"""

from penstock.planning.simulation.jobs import simulate_jobs
from penstock.planning.simulation.model import (
    ClusterModel,
    JobModel,
    Scenario,
    load,
    parse,
    presets,
)
from penstock.planning.simulation.replay import Replay, read_replay
from penstock.planning.simulation.runs import Results, Times, simulate
from penstock.planning.simulation.sharing import Flow, finish_times, max_min
from penstock.planning.simulation.timeline import timeline

__all__ = [
    "ClusterModel",
    "Flow",
    "JobModel",
    "Replay",
    "Results",
    "Scenario",
    "Times",
    "finish_times",
    "load",
    "max_min",
    "parse",
    "presets",
    "read_replay",
    "simulate",
    "simulate_jobs",
    "timeline",
]
