"""The table of a run, as Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock_bench.suites.gpu.rows import ROWS
from penstock_bench.suites.save_load.results import spread

if TYPE_CHECKING:
    from penstock_bench.suites.gpu.results import Results

SMOKE = (
    "**This ran on the driver for tests, at small sizes: it shows that everything runs. No figure "
    "says anything about a GPU.**"
)


def markdown(results: Results) -> str:
    """Everything that a run shows."""
    gpu, settings = results.gpu, results.settings
    lines = [
        f"# {gpu['name']}",
        "",
        *([SMOKE, ""] if gpu["is_stand_in"] else []),
        f"Driver for CUDA {gpu['cuda']}, PyTorch {gpu['torch']}; {results.machine['processor']}, "
        f"{results.machine['cores_usable']} cores, Linux {results.machine['kernel']}. "
        f"{settings['size_bytes'] / 1e9:.2f} GB of tensors, {settings['rounds']} interleaved "
        f"rounds, {settings['seconds']:.0f} s in all. Medians [least, most]; a ratio is of one "
        "round, L the rate of the link in the same round.",
        "",
        *(
            f"- {name}: {place['directory']}, {place['file_system']} on {place['device']}"
            for name, place in results.places.items()
        ),
        "",
        "| what | bar | found | |",
        "|---|---|---|---|",
        *(_row(results, name) for name in ROWS),
    ]
    notes = [f"- {ROWS[name].title}: {note}" for name, note in results.notes.items()]
    if notes:
        lines += ["", *notes]
    lines += ["", "| figure | median [least, most] |", "|---|---|"]
    lines += [f"| {name} | {_figures(values)} |" for name, values in results.figures.items()]
    return "\n".join(lines) + "\n"


def _row(results: Results, name: str) -> str:
    row = ROWS[name]
    found = results.spread(name)
    if found is None:
        return f"| {row.title} | {row.bar} | not run: {results.reason(name)} | |"
    unit = f" {row.unit}" if row.unit else ""
    verdict = "met" if row.is_met(found.median) else "**missed**"
    if results.gpu["is_stand_in"]:
        verdict = ""
    return f"| {row.title} | {row.bar} | {_figures(results.values[name])}{unit} | {verdict} |"


def _figures(values: list[float]) -> str:
    found = spread(values)
    if found is None:
        return "-"
    ends = f" [{found.least:.3g}, {found.most:.3g}]" if len(values) > 1 else ""
    return f"{found.median:.3g}{ends}"
