"""README lists each feature with its page, or as absent; the FAQ agrees with the list."""

from __future__ import annotations

import re

import pytest

from conftest import REPOSITORY
from pages import named, pages, prose

README = REPOSITORY / "README.md"
FAQ = REPOSITORY / "docs/faq.md"
ROW = re.compile(r"^\| (?P<feature>[^|]+) \| (?P<state>[^|]+) \| (?P<page>[^|]*)\|$", re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)#]+)(#[^)]*)?\)")
ABSENT = "not there"
ABSENCE = re.compile(
    r"\b(?:is|are) not there yet\b|\b(?:is|are) ahead\.|\bnot known yet\b|\bnot supported yet\b"
)
WORDS = {
    "object storage": "docs/buckets.md",
    "mirror": "docs/mirror.md",
    "GPU": "docs/gpu.md",
    "encrypt": "docs/security.md",
    "sign": "docs/signing.md",
}
"""Features by their words, with the page of each; None for an absent feature."""


def _rows() -> dict[str, tuple[str, str]]:
    status = README.read_text().partition("## Status")[2].partition("\n## ")[0]
    rows = {
        found["feature"]: (found["state"].strip(), found["page"]) for found in ROW.finditer(status)
    }
    rows.pop("feature")
    return rows


def test_each_feature_has_a_page_or_is_absent() -> None:
    rows = _rows()
    assert len(rows) >= 5
    for feature, (state, page) in rows.items():
        targets = [found["target"] for found in LINK.finditer(page)]
        assert bool(targets) != (state == ABSENT), feature
        for target in targets:
            assert (REPOSITORY / target).is_file(), target


@pytest.mark.parametrize("word", list(WORDS))
def test_status_and_questions_agree_on_a_feature(word: str) -> None:
    rows = {name: row for name, row in _rows().items() if word.lower() in name.lower()}
    assert rows, f"no row of README's status names {word}"
    page = WORDS[word]
    for state, pages_ in rows.values():
        assert (state == ABSENT) == (page is None)
        assert page is None or page in pages_
    answers = re.split(r"^## ", FAQ.read_text(), flags=re.MULTILINE)[1:]
    about = [one for one in answers if word.lower() in one.lower()]
    assert about, f"no question speaks of {word}"
    if page is None:
        assert any(one.partition("\n\n")[2].startswith("No.") for one in about)
    else:
        linked = page.removeprefix("docs/")
        assert any(linked in one for one in about), f"no answer about {word} links {linked}"


@pytest.mark.parametrize("page", pages(), ids=named)
def test_no_page_says_of_a_feature_that_it_will_come(page) -> None:
    """The list names absent features; elsewhere such sentences outlive their feature's arrival."""
    found = [(number, line) for number, line in prose(page) if ABSENCE.search(line)]
    assert not found
