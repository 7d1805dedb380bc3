"""The tables that suites show: rows of figures, ratios within a round, bars that have to be met."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType

    from penstock_bench.results.samples import Samples
    from penstock_bench.results.spread import Spread

WITHIN = "Within a round, then their median."


def page(
    results: Samples[Any],
    *parts: RenderableType,
    lines: Sequence[str] = (),
) -> Group:
    """Everything that a run shows: machine and disk, then the parts.

    Args:
        results: The run.
        parts: Tables and notes; a string is a line.
        lines: Further lines of the heading.
    """
    heading = [*describe(results.machine, results.disk), *lines]
    shown = [Text(one) if isinstance(one, str) else one for one in parts]
    return Group(Text("\n".join(heading)), Text(), *shown)


def describe(machine: dict[str, Any], disk: dict[str, Any]) -> list[str]:
    """The machine and the disk that figures belong to: the first lines of every report."""
    queue = disk["queue"]
    alignment = disk["direct_io_alignment"] or {}
    return [
        f"{machine['processor']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, {machine['virtual'] or 'bare metal'}; "
        f"Linux {machine['kernel']}, {machine['system']}",
        f"{disk['file_system']} on {disk['device']} ({disk['mount_options']}), "
        f"scheduler {queue.get('scheduler', '?')}, write cache {queue.get('write_cache', '?')}, "
        f"direct I/O alignment {alignment.get('memory_bytes', '?')}"
        f"/{alignment.get('offset_bytes', '?')} bytes; {disk['directory']}",
    ]


def cell(found: Spread | None, form: str = ".3g", missing: str = "-") -> str:
    """A median with its range."""
    return found.with_range(form) if found else missing


def figures(
    title: str | None,
    headings: Sequence[str],
    rows: Mapping[str, Sequence[str]],
    *,
    first: str = "",
    caption: str | None = None,
    bold: str | None = None,
) -> Table:
    """A table of figures.

    Args:
        title: Above it.
        headings: Of the columns of figures.
        rows: The cells of each row, by its name.
        first: The heading of the names.
        caption: Below it.
        bold: Rows whose names begin with it are printed in bold.
    """
    # Brackets are text, not markup.
    table = Table(first, title_justify="left", title_style="bold", caption=caption)
    table.title = Text(title) if title else None
    for heading in headings:
        table.add_column(Text(heading), justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells, style="bold" if bold and name.startswith(bold) else "")
    return table


def ratios(
    found: Iterable[tuple[str, Spread | None]],
    heading: str = "ratio of times",
    *,
    title: str | None = None,
    caption: str = WITHIN,
    missing: str | None = None,
) -> Table:
    """A table of ratios.

    Args:
        found: Title and value of each.
        heading: Of the titles.
        title: Above it.
        caption: Below it.
        missing: Stands for ratios that were not measured; None leaves these out.
    """
    rows = {name: [cell(one, missing=missing or "")] for name, one in found if one or missing}
    return figures(title, ["median [least, most]"], rows, first=heading, caption=caption)


def notes(errors: Iterable[str], words: Mapping[str, str] | None = None) -> list[Text]:
    """Lines below a table: what failed, and what its rows are."""
    failed = [Text(f"  FAILED: {error}", style="bold red") for error in errors]
    return failed + [Text(f"  {row}: {text}") for row, text in (words or {}).items()]


@dataclass(frozen=True)
class Bar:
    """A ratio that the project holds itself to, and its measured value.

    Attributes:
        title: The ratio in words.
        found: Its value; None if it was not measured.
        bar: What it has to reach, or with ``is_ceiling`` not to pass; None for a ratio to be seen.
        aim: What it is to reach some day.
        is_ceiling: Whether less is better.
        state: The state that was saved, where a suite has several.
    """

    title: str
    found: Spread | None
    bar: float | None
    aim: float | None = None
    is_ceiling: bool = False
    state: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the median reaches the bar; None if there is none, or no value."""
        if self.found is None or self.bar is None:
            return None
        return self.found.median <= self.bar if self.is_ceiling else self.found.median >= self.bar

    def as_json(self, *, is_judged: bool = True) -> dict[str, Any]:
        """The bar for the file of results."""
        found = self.found._asdict() if self.found else None
        return {**asdict(self), "found": found, "is_met": self.is_met if is_judged else None}


def bars(every: Sequence[Bar], unofficial: str | None) -> Table:
    """The table of bars.

    They are not judged where there is a reason why the run is unofficial.
    """
    caption = WITHIN if unofficial is None else f"{WITHIN} Not judged: {unofficial}."
    table = Table("", "ratio", title="Bars", title_justify="left", title_style="bold")
    table.caption = caption
    for heading in ("median [least, most]", "bar", "aim", ""):
        table.add_column(Text(heading), justify="right")
    for one in every:
        is_met = one.is_met if unofficial is None else None
        table.add_row(
            one.state,
            one.title,
            cell(one.found, ".3f", "not measured"),
            "" if one.bar is None else f"{'<=' if one.is_ceiling else '>='} {one.bar:g}",
            "" if one.aim is None else f"{one.aim:g}",
            {None: "", True: "met", False: "MISSED"}[is_met],
            style={None: "" if one.found else "dim", True: "green", False: "bold red"}[is_met],
        )
    return table
