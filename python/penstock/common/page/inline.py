"""A drawing as a part of a page: SVG without anything that reaches beyond itself."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from markupsafe import Markup

from penstock.common.page.palette import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_VARIABLES = {shades.light: f"var(--{name})" for name, shades in COLOURS.items()}

_FONT = re.compile(r"font: ([\d.]+px)[^;]*")


def inline(figure: Figure, *, name: str, label: str) -> Markup:
    """The drawing as an element for HTML.

    Its colours are the variables of the page, its letters those of the page, its width that of
    its place. The name is that of no other drawing of the page, and identifiers begin with it.
    The label is for who cannot see the drawing.
    """
    drawn = io.BytesIO()
    with warnings.catch_warnings():
        # The browser chooses a font that has the character.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(drawn, format="svg")
    root = ET.fromstring(drawn.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # Facts about the file with addresses, and rules that would hold for the whole page.
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        # HTML knows the elements of SVG by their plain names, links among them.
        element.tag = _local(element.tag)
        element.attrib = {
            _local(key): _value(_local(key), value, name) for key, value in element.attrib.items()
        }
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.attrib |= {"role": "img", "aria-label": label}
    # Escaped by ElementTree.
    return Markup(ET.tostring(root, encoding="unicode"))


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _value(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return value.replace("#", f"#{name}-", 1)
    if key == "clip-path":
        return value.replace("url(#", f"url(#{name}-", 1)
    if key == "style":
        value = _FONT.sub(r"font-size: \1", value)
        for colour, variable in _VARIABLES.items():
            value = value.replace(colour, variable)
    return value
