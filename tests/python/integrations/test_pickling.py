"""Values that a plug-in pickles on request, named as `penstock.inspect` shows names."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.integrations import pickling


class Opaque:
    """A class that only pickle can store."""


def pickled(state: Any, *patterns: str) -> list[str]:
    """Returns the keys of the pickled values, joined by slashes."""

    def walk(one: Any, path: tuple[str, ...]) -> list[str]:
        if isinstance(one, dict) and list(one) == ["penstock.pickle"]:
            return ["/".join(path)]
        items = one.items() if isinstance(one, dict) else []
        return [found for key, inner in items for found in walk(inner, (*path, repr(key)))]

    return walk(pickling.packed(state, "", patterns), ())


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"w\[0]", ["'w[0]'"]),
        ("w[0]", ["'w[0]'", "'w0'"]),
        (r"a\\b", ["'a\\\\b'"]),
        ("a\\b", ["'a\\\\b'"]),
        ("m.ema", ["'m'/'ema'"]),
        (r"m\.ema", ["'m.ema'"]),
        ("n.ema", ["'n.ema'"]),
        ("1", ["'1'"]),
        (r"\1", ["1"]),
        ("m.*", ["'m'/'ema'"]),
        ("*.ema", ["'m'/'ema'", "'m.ema'", "'n.ema'"]),
    ],
)
def test_a_value_is_named_as_inspect_shows_names_or_by_its_keys(
    pattern: str, found: list[str]
) -> None:
    state = {
        "w[0]": Opaque(),
        "w0": Opaque(),
        "a\\b": Opaque(),
        "m": {"ema": Opaque()},
        "m.ema": Opaque(),
        "n.ema": Opaque(),
        "1": Opaque(),
        1: Opaque(),
    }
    assert pickled(state, pattern) == found
