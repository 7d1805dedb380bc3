"""Lists of names on the command line: ``one,other``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def names_of(
    known: Mapping[str, str],
) -> Callable[[click.Context, click.Parameter, str | None], list[str] | None]:
    """A callback that parses names separated by commas, each one of the known names."""

    def parsed(_: click.Context, __: click.Parameter, text: str | None) -> list[str] | None:
        if text is None:
            return None
        names = list(dict.fromkeys(one.strip() for one in text.split(",")))
        for name in names:
            if name not in known:
                listed = "; ".join(f"{one}: {what}" if what else one for one, what in known.items())
                raise click.BadParameter(f"there is no {name!r}. Known are {listed}")
        return names

    return parsed
