"""`enable`: replaces functions of Lightning that no plug-in can reach, once per process.

Importing the plug-in does not call it. The modules that have replacements register them with
`on_enable`; `enable` applies them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_pending: list[Callable[[], None]] = []
"""Registered functions that have not been called yet."""


def on_enable(replace: Callable[[], None]) -> Callable[[], None]:
    """Registers a function that `enable` calls once; returns it."""
    _pending.append(replace)
    return replace


def enable() -> None:
    """Makes Lightning load checkpoints that are directories wherever it loads files.

    `PenstockIO` and the strategies do this when they are made. Call it in a program that makes none
    of them before it calls ``LightningModule.load_from_checkpoint`` with a directory. May be
    called again.

    Example:
        >>> from penstock.integrations import lightning
        >>> lightning.enable()
    """
    while _pending:
        _pending.pop(0)()
