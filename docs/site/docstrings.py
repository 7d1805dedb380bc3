"""Docstrings as the site reads them: an extension of griffe."""

from __future__ import annotations

from typing import Any

import griffe

_SINGULAR, _PLURAL = "\nExample:\n", "\nExamples:\n"


class Examples(griffe.Extension):  # type: ignore[misc]
    """Calls the section `Example:` as griffe knows it.

    Otherwise it is a mere note, and its lines are no code.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of what was just read."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace(_SINGULAR, _PLURAL)
