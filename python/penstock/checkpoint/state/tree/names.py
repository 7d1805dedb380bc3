r"""Names of leaves, and patterns over them, as calls accept them.

`penstock.inspect` shows the names of all tensors with bytes: of leaves, and of the members of a
leaf that is a composite tensor or a value of a class. A load loads such a leaf whole, by its name.
A plain load can load the members separately, and `penstock.features.open` reads rows of one.

A leaf's name is its path: keys and indices, joined by dots. Characters with a meaning in patterns
are escaped by a backslash: ``\\``, ``\*``, ``\?``, ``\[``. Few states need more:

* ``{"a": {"b": 1}, "a.b": 2}``: dots of a key are written ``\.`` if the key starts with the name
  of a container beside it and a dot, so that these are ``a.b`` and ``a\.b``;
* ``{"1": 3, 1: 4}``: of keys with the same text, those that are not strings get a backslash in
  front, so that these are ``1`` and ``\1``;
* keys with the same text that are not strings, such as several nan: ``nan``, ``nan\~2``, …;
* lone surrogates are written as in Python, ``\udc80``, and an empty name is ``\``.

Names are therefore one-to-one, and a name depends only on the dictionaries around its leaf. Parts
and shards use other names (`docs/format.md`, 6.4).
"""

from __future__ import annotations

import fnmatch
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.state.tree.scalars import label

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EMPTY = "\\"
"""The name of a leaf under an empty key."""

_SPECIAL = re.compile(r"[\\*?\[]")
_ESCAPE = re.compile(r"\\(.|$)", re.DOTALL)
_KEY_ESCAPE = re.compile(r"\\(ud[89a-f][0-9a-f]{2}|.|$)", re.DOTALL)
_LITERAL = "\\*?["
_STRUCTURAL = "\ud800"
"""Represents the backslash of an escape that is not a character of a key; no name contains it."""


def escaped(text: str) -> str:
    r"""Escapes a key, or several joined by dots, as in names.

    Example:
        >>> print(escaped("w[0].*"))
        w\[0].\*
    """
    text = _SPECIAL.sub(r"\\\g<0>", text)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def unescaped(name: str) -> str:
    r"""Returns the raw keys of a name, joined by dots.

    Example:
        >>> print(unescaped(r"w\[0].a\.b"))
        w[0].a.b
    """
    return _KEY_ESCAPE.sub(_unescape, name) if "\\" in name else name


def plain_text(name: str) -> str:
    """Returns a name in the form of files; `docs/format.md`, 6.4."""
    return name.encode("utf-8", "backslashreplace").decode()


def containers(name: str) -> list[str]:
    r"""Returns the possible names of the containers around a leaf, the outermost first.

    Example:
        >>> containers(r"a.b\.c.w")
        ['a', 'a.b\\.c']
    """
    dots = re.finditer(r"\.", _ESCAPE.sub("__", name))
    return [name[: dot.start()] for dot in dots]


def _unescape(found: re.Match[str]) -> str:
    text = found.group(1)
    return chr(int(text[1:], 16)) if len(text) > 1 else text


def labels(keys: Sequence[Any], is_container: Callable[[int], bool]) -> list[str]:
    """Returns the unique part of each key of one dictionary in the names below it.

    ``is_container`` tells whether the value under the key of an index has leaves below it.
    """
    texts = [key if type(key) is str else label(key) for key in keys]
    joined = "".join(texts)
    found = texts
    if not joined.isascii() or _SPECIAL.search(joined):
        found = [escaped(text) for text in texts]
    if "." in joined:
        clashing = _clashing(texts, is_container)
        found = [
            text.replace(".", "\\.") if index in clashing else text
            for index, text in enumerate(found)
        ]
    if len(set(found)) < len(found):
        found = _apart(keys, found)
    return found


def _clashing(texts: Sequence[str], is_container: Callable[[int], bool]) -> set[int]:
    """Returns the indices of keys that start with the name of a container and a dot."""
    # In this order, a text that starts with another one and a dot comes directly after it.
    order = sorted(range(len(texts)), key=lambda index: f"{texts[index]}.")
    pairs = pairwise(order)
    if not any(texts[after].startswith(f"{texts[before]}.") for before, after in pairs):
        return set()
    containers = {text for index, text in enumerate(texts) if is_container(index)}
    return {
        index
        for index, text in enumerate(texts)
        if any(text[: dot.start()] in containers for dot in re.finditer(r"\.", text))
    }


def _apart(keys: Sequence[Any], found: Sequence[str]) -> list[str]:
    texts = {text for key, text in zip(keys, found, strict=True) if type(key) is str}
    counts: dict[str, int] = {}
    apart = []
    for key, text in zip(keys, found, strict=True):
        if type(key) is not str:
            marked = f"\\{text}" if text in texts else text
            count = counts[marked] = counts.get(marked, 0) + 1
            text = marked if count == 1 else f"{marked}\\~{count}"
        apart.append(text)
    return apart


def is_wild(pattern: str) -> bool:
    """Whether a pattern may match more leaves than the one whose name it is."""
    return not {"*", "?", "["}.isdisjoint(_ESCAPE.sub("", pattern))


def matcher(pattern: str) -> Callable[[str], bool]:
    """Returns a function that tells whether a name matches a pattern of `fnmatch`.

    In a pattern, a backslash escapes the character after it, as in a name. A pattern such as
    ``w[0]`` also matches a key with exactly this text.
    """
    if not is_wild(pattern):
        return pattern.__eq__
    matches = re.compile(fnmatch.translate(_ESCAPE.sub(_in_pattern, pattern))).match

    def is_match(name: str) -> bool:
        if "\\" not in name:
            return matches(name) is not None
        folded = _ESCAPE.sub(_in_name, name)
        return matches(folded) is not None or folded == pattern

    return is_match


def _in_name(escape: re.Match[str]) -> str:
    return escape[1] if escape[1] and escape[1] in _LITERAL else f"{_STRUCTURAL}{escape[1]}"


def _in_pattern(escape: re.Match[str]) -> str:
    literal = _in_name(escape)
    return f"[{literal}]" if literal in ("*", "?", "[") else literal
