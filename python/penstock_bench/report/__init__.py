"""One page of HTML out of results: tables, plots, and what they belong to.

The page holds everything it shows. It asks the network for nothing, runs no script, follows the
reader's choice of light or dark, and prints.

`lines` and `tables` say what is shown, `plots` draws, `drawn` has all drawings in their order,
and `page` puts the page together, in the frame of `penstock.common.page`. Jinja2 and Matplotlib
are imported when a page is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.common import page as pages
from penstock_bench.results.results import Results

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence


def write_report(results: Results | Sequence[Results], path: str | os.PathLike[str]) -> None:
    """Writes a page that shows one run, or several below each other.

    Args:
        results: What was measured.
        path: The page; what is there is replaced.

    Raises:
        MissingDependencyError: Jinja2 or Matplotlib is not installed.
        OSError: The page cannot be written.

    Example:
        >>> from pathlib import Path
        >>> from penstock_bench.results.results import Results
        >>> write_report(Results.read(Path("run.json")), "run.html")  # doctest: +SKIP
    """
    require_libraries()
    from penstock_bench.report.page import page

    runs = [results] if isinstance(results, Results) else list(results)
    pages.write(page(runs), path)


def require_libraries() -> None:
    """Finds out whether a page can be made at all.

    Raises:
        MissingDependencyError: Jinja2 or Matplotlib is not installed.
    """
    pages.require_libraries("a report", "bench")
