"""The page of `penstock plan --html`."""

from __future__ import annotations

import json
import re
import sys

import pytest
from click.testing import CliRunner

from penstock.cli import cli
from penstock.planning import Drives, Training, advise, cluster_of, given
from penstock.planning.page import write_page

CHARTS = ("Lost time", "Parts of the lost time", "Bytes written a day", "Life of the drives")


def run(*arguments, code=0):
    result = CliRunner().invoke(cli, ["plan", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def captions(text):
    return [one.strip() for one in re.findall(r"<figcaption>([^<]*)<", text)]


def advice(seconds=60.0, **more):
    number = given(seconds, "s", "test")
    return advise(training=Training(number, number, **more), cluster=cluster_of(nodes=64))


def test_the_page_shows_the_answer_charts_and_inputs(tmp_path):
    page = tmp_path / "plan.html"
    said = run(
        "--save-seconds", 60, "--nodes", 64, "--save-bytes", "1TB", "--drives", 2,
        "--drive-bytes", "7.68TB", "--drive-endurance", "14PB",
        "--what-if", "nodes=512,4096", "--html", page,
    )  # fmt: skip
    text = page.read_text()
    assert captions(text) == [*CHARTS, "Other numbers of nodes"]
    assert text.count("<svg") == 5
    assert said.splitlines()[0] in text
    assert '<td class="number">4,096</td>' in text
    assert text.count("a guess") == 3
    assert "--save-seconds" in text


def test_charts_of_unknown_numbers_are_left_out(tmp_path):
    write_page(advice(), tmp_path / "plan.html")
    assert captions((tmp_path / "plan.html").read_text()) == list(CHARTS[:2])


def test_the_page_holds_everything_and_trusts_no_name(tmp_path):
    hostile = '<script>alert(1)</script>"><img src=http://a.example/x>'
    write_page(advice(step=given(2.0, "s", hostile)), tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.findall(r"<(?:img|link|iframe)", text)
    assert not re.findall(r'(?:src|href)="(?!#)', text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize("seconds", [1e-3, 0.5, 3600, 1e6])
def test_intervals_of_any_length_are_drawn(tmp_path, seconds):
    write_page(advice(seconds, save_bytes=given(1e9, "bytes", "test")), tmp_path / "plan.html")
    assert len(captions((tmp_path / "plan.html").read_text())) == 3


def test_the_shares_of_another_interval_are_worse():
    made = advise(
        training=Training(given(1.0, "s", "test"), given(60, "s", "test")),
        cluster=cluster_of(nodes=64, drives=Drives(1, 1e12)),
    )
    best = made.interval.value
    found = [made.shares_at(best * factor).goodput for factor in (0.2, 1.0, 5.0)]
    assert max(found) == found[1] == made.goodput.value
    with pytest.raises(ValueError, match="a save takes 60 s"):
        made.shares_at(59)


def test_without_the_libraries_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = CliRunner().invoke(
        cli, ["plan", "--save-seconds", "60", "--nodes", "8", "--html", str(tmp_path / "plan.html")]
    )
    assert "pip install 'penstock[plan]'" in str(result.exception)
    assert json.loads(run("--save-seconds", 60, "--nodes", 8, "--json"))["goodput"] > 0.9


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    said = run("--save-seconds", 60, "--nodes", 8, "--html", tmp_path / "no" / "p.html", code=1)
    assert "No such file" in said
