"""The example that the help of every command ends with."""

from __future__ import annotations


def example(*lines: str, after: str = "") -> str:
    """What a help ends with.

    Args:
        lines: Command lines, as they are typed.
        after: What comes before them.
    """
    heading = "Example:" if len(lines) == 1 else "Examples:"
    # The mark of a paragraph that click leaves as it is.
    shown = "\n".join(["\b", heading, *(f"  {line}" for line in lines)])
    return f"{after.rstrip()}\n\n{shown}" if after else shown
