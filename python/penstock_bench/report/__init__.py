"""One page of HTML out of results: tables, plots, and what they belong to.

The page holds everything it shows. It asks the network for nothing, runs no script, follows the
reader's choice of light or dark, and prints.

`lines`, `grids` and `tables` say what is shown, `plots` and `bars` draw, `drawn` has all drawings
in their order, `inline` makes of a drawing a part of the page, and `page` puts it together. Jinja2
and Matplotlib are imported when a page is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import MissingDependencyError
from penstock_bench.results.results import Results

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

_MODULES = ("jinja2", "matplotlib")


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
    # A label may hold half of a surrogate pair, which has no form in UTF-8.
    Path(path).write_text(page(runs), encoding="utf-8", errors="backslashreplace")


def require_libraries() -> None:
    """Finds out whether a page can be made at all.

    Raises:
        MissingDependencyError: Jinja2 or Matplotlib is not installed.
    """
    for name in _MODULES:
        try:
            __import__(name)
        except ImportError as error:
            raise MissingDependencyError(
                "a report takes Jinja2 and Matplotlib: pip install 'penstock[bench]'", name=name
            ) from error
