"""The colours of a page, light and dark.

Plots are drawn in the light ones, which become variables of the page (`inline`), so that one
drawing serves both.
"""

from __future__ import annotations

from typing import NamedTuple


class Shades(NamedTuple):
    """One colour on a light and on a dark page."""

    light: str
    dark: str


SERIES = (
    Shades("#0072b2", "#56b4e9"),
    Shades("#d55e00", "#e8703a"),
    Shades("#009e73", "#00a37a"),
    Shades("#cc79a7", "#f7c4de"),
    Shades("#332288", "#7d8590"),
    Shades("#5c4a00", "#f0e442"),
    Shades("#882255", "#9f6fd9"),
    Shades("#111111", "#ffffff"),
)
"""Of lines and bars, after Okabe and Ito (2008) and Tol.

Any two of them are at least 14 apart in CIE Lab, also for a reader who lacks one of the three cones
(Machado et al. 2009), and each has a contrast of 3 to the page. Markers tell lines apart as well.
"""

COLOURS = {
    "paper": Shades("#ffffff", "#0d1117"),
    "ink": Shades("#1b1f24", "#e6edf3"),
    "muted": Shades("#57606a", "#9aa4af"),
    "rule": Shades("#d0d7de", "#30363d"),
    "shade": Shades("#f6f8fa", "#161b22"),
    "alarm": Shades("#b42318", "#ff8078"),
    **{f"series-{number}": shades for number, shades in enumerate(SERIES)},
}
"""Every colour by the name of its variable."""
