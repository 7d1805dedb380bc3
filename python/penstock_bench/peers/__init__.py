"""Penstock and the libraries it is compared with, behind one interface for each job.

A contender is a row: it names a class, which is imported only in the process that runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
"""How DeepSpeed's own async_io is set where it is held against ours."""


@dataclass(frozen=True)
class Entry:
    """A contender by name: what is known of it without importing its library.

    Attributes:
        module: The module of the class.
        attribute: The name of the class there.
        package: The distribution that it needs, as pip calls it; an empty name for none.
        note: What it does.
        library: The module that the distribution brings, if it has another name.
        options: Keyword arguments of the class.
    """

    module: str
    attribute: str
    package: str
    note: str
    library: str = field(default="", kw_only=True)
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def missing(self) -> str | None:
        """How to install its library; None where it is installed."""
        library = self.library or self.package.replace("-", "_")
        if not library or find_spec(library) is not None:
            return None
        return f"{self.package} is not installed: pip install {self.package}"

    def make(self, *arguments: Any) -> Any:
        """An instance of the class, with these positional arguments and its options."""
        return getattr(import_module(self.module), self.attribute)(*arguments, **self.options)
