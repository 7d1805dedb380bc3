"""Pages of HTML that hold everything they show: one file, no script, no request to the network.

They follow the reader's choice of light or dark, and print. `base.html.j2` is the frame that
templates extend, `palette` has its colours, `style` the settings of Matplotlib, and `inline` makes
a drawing a part of a page. Jinja2 and Matplotlib are imported when a page is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common.page.palette import COLOURS
from penstock.errors import MissingDependencyError

if TYPE_CHECKING:
    import os

    from jinja2 import Template

_MODULES = ("jinja2", "matplotlib")


def require_libraries(purpose: str, extra: str) -> None:
    """Checks that a page can be made.

    Args:
        purpose: Begin of the error's message, as ``a report``.
        extra: The extra of the package that installs the libraries.

    Raises:
        MissingDependencyError: Jinja2 or Matplotlib is not installed.
    """
    for name in _MODULES:
        try:
            __import__(name)
        except ImportError as error:
            raise MissingDependencyError(
                f"{purpose} takes Jinja2 and Matplotlib: pip install 'penstock[{extra}]'", name=name
            ) from error


def template(directory: Path, name: str) -> Template:
    """A template of a directory, which may extend the frame of all pages."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([directory, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["colours"] = COLOURS
    return environment.get_template(name)


def write(page: str, path: str | os.PathLike[str]) -> None:
    """Writes a page; a file of that name is replaced.

    Raises:
        OSError: The page cannot be written.
    """
    # A label may hold half of a surrogate pair, which has no form in UTF-8.
    Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
