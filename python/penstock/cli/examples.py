"""Examples at the end of every command's help."""

from __future__ import annotations


def example(*lines: str, after: str = "") -> str:
    """The end of a help text."""
    heading = "Example:" if len(lines) == 1 else "Examples:"
    # \b marks a paragraph that click does not wrap.
    shown = "\n".join(["\b", heading, *(f"  {line}" for line in lines)])
    return f"{after.rstrip()}\n\n{shown}" if after else shown
