"""`Counts`: failures and running time, as the reader of a log finds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counts:
    """Failures and running time that a log shows.

    Attributes:
        failures: Number of failures by kind.
        others: Ends that are no failures, by kind.
        left_out: Lines that were not used, by reason.
        node_seconds: Running time of all nodes, in seconds.
        nodes: Nodes of the newest job; 0 before one.
    """

    failures: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    node_seconds: float = 0.0
    nodes: int = 0
