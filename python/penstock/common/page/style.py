"""Settings of Matplotlib for drawings of a page: the light colours of the palette, on no ground."""

from __future__ import annotations

from typing import Any

from penstock.common.page.palette import COLOURS

SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8.5,
    # Letters stay letters: sharp at any size, and found by a search.
    "svg.fonttype": "none",
    # Names of parts do not change from run to run.
    "svg.hashsalt": "penstock",
    # A label may hold dollar signs.
    "text.parse_math": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": COLOURS["rule"].light,
    "grid.linewidth": 0.6,
    "axes.edgecolor": COLOURS["muted"].light,
    "axes.linewidth": 0.6,
    "xtick.color": COLOURS["muted"].light,
    "ytick.color": COLOURS["muted"].light,
    "xtick.labelcolor": COLOURS["ink"].light,
    "ytick.labelcolor": COLOURS["ink"].light,
    "text.color": COLOURS["ink"].light,
    "axes.labelcolor": COLOURS["ink"].light,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
}
