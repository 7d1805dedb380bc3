"""A page that shows advice with charts, for a browser: `penstock plan --html`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common import page as pages
from penstock.planning import shown

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from penstock.planning.advice import Advice


def write_page(advice: Advice, path: str | os.PathLike[str], others: Sequence[Advice] = ()) -> None:
    """Writes a page that shows advice: the answer, charts, tables, and all inputs.

    Args:
        advice: The advice to show.
        path: The page; a file of that name is replaced.
        others: Advice for other numbers of nodes; see `Advice.with_nodes`.

    Raises:
        MissingDependencyError: Jinja2 or Matplotlib is not installed.
        OSError: The page cannot be written.

    Example:
        >>> from penstock.planning import Training, advise, cluster_of, given
        >>> from penstock.planning.page import write_page
        >>> run = Training(durable=given(60, "s", "bench"))
        >>> advice = advise(training=run, cluster=cluster_of(nodes=64))
        >>> write_page(advice, "plan.html", [advice.with_nodes(1024)])
    """
    require_libraries()
    from penstock.planning.page.drawings import drawings

    page = pages.template(Path(__file__).parent, "plan.html.j2").render(
        headline=shown.headline(advice),
        notes=advice.notes,
        guesses=[name.replace("_", " ") for name in advice.guesses],
        facts=list(shown.facts(advice)),
        drawings=list(drawings(advice, others)),
        what_if_columns=shown.WHAT_IF,
        what_if=list(shown.what_if(others)),
        inputs=list(shown.inputs(advice.inputs)),
    )
    pages.write(page, path)


def require_libraries() -> None:
    """Checks that a page can be made.

    Raises:
        MissingDependencyError: Jinja2 or Matplotlib is not installed.
    """
    pages.require_libraries("a page", "plan")
