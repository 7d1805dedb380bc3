"""Docstrings as the site reads them: an extension of griffe."""

from __future__ import annotations

from typing import Any

import griffe

_SINGULAR, _PLURAL = "\nExample:\n", "\nExamples:\n"


class Examples(griffe.Extension):  # type: ignore[misc]
    """Renames the section `Example:` to the name that griffe knows.

    Otherwise griffe treats it as a note, and its lines as text.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of an object after griffe has read it."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace(_SINGULAR, _PLURAL)
