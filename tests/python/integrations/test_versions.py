"""Versions of a framework that a plug-in was not tried with are refused, by name."""

from importlib.metadata import version

import pytest

import penstock
from penstock.integrations.versions import check_version


@pytest.mark.parametrize(
    ("found", "first", "last", "fits"),
    [
        ("2.6.0", "2.6", "2.6", True),
        ("2.6.9.post1+cpu", "2.6", "2.6", True),
        ("2.7.0", "2.6", "2.6", False),
        ("2.5.9", "2.6", "2.6", False),
        ("2.10.1", "2.6", "2.11", True),
        ("3.0.0rc1", "2.6", "2.11", False),
        ("2.12", "2.6", "2.11.3", False),
        ("2.11.4", "2.6", "2.11.3", False),
    ],
)
def test_a_version_is_taken_from_the_first_to_the_last(monkeypatch, found, first, last, fits):
    monkeypatch.setattr("penstock.integrations.versions.version", lambda name: found)
    if fits:
        check_version("lightning", first, last)
        return
    with pytest.raises(penstock.MissingDependencyError, match=r"lightning .* installed") as caught:
        check_version("lightning", first, last)
    assert caught.value.name == "lightning"
    monkeypatch.setenv("PENSTOCK_UNTESTED", "ray, lightning")
    check_version("lightning", first, last)


def test_what_is_missing_is_named_with_what_installs_it():
    with pytest.raises(penstock.MissingDependencyError, match=r"pip install .no-such>=1\.2"):
        check_version("no-such", "1.2", "1.3")
    check_version("numpy", "1.0", version("numpy"))
