"""The README of a release, as an index shows it outside of the repository."""

from __future__ import annotations

import re
from pathlib import Path

from release.source import linked

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
ADDRESS = "https://forge.example/penstock"


def links(text):
    return re.findall(r"\]\(([^)]+)\)", text)


def test_every_link_of_the_readme_leads_to_a_file():
    for target in links(README):
        assert target.startswith("https:") or (ROOT / target.partition("#")[0]).exists()


def test_links_lead_to_the_files_of_the_version():
    found = links(linked(README, ADDRESS, "1.2.3"))
    relative = [target for target in links(README) if not target.startswith("https:")]
    expected = [f"{ADDRESS}/blob/v1.2.3/{target}" for target in relative]
    assert expected
    assert [target for target in found if target in expected] == expected
    assert len(found) == len(links(README))


def test_without_an_address_what_a_link_says_is_left():
    found = linked(README, None, "1.2.3")
    assert all(target.startswith("https:") for target in links(found))
    assert "- docs/format.md: the bytes on disk" in found


def test_links_that_hold_anywhere_stay():
    text = "[a](https://a.example/b) [c](#d) [e](docs/f.md)"
    assert linked(text, None, "1") == "[a](https://a.example/b) [c](#d) e"
