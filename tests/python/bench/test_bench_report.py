"""The page of a benchmark: that it shows everything, holds everything, and believes nobody."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser

import pytest

from conftest import tell
from penstock.common.machine import facts
from penstock.common.page.palette import COLOURS, SERIES
from penstock_bench.harness import cases
from penstock_bench.harness.cases import Case
from penstock_bench.harness.running import run
from penstock_bench.report import write_report
from penstock_bench.report.lines import grids
from penstock_bench.report.plots import BARS_MAX
from penstock_bench.results.results import Measurement, Results

MIB = 1 << 20

HOSTILE = [
    '<script>alert(1)</script>, "><img src=http://a.example/x onerror=alert(1)>',
    "</style></title></svg><iframe src='//a.example'>",
    "{{ 7 * 7 }} {% raw %} $\\frac{1}{0}$ &amp; &#x3c;",
    "_underscore",
    "escape \x1b[31m, nul \x00, half \ud800, 日本語, مرحبا\nsecond line",
    "long " + "x" * 3000,
]

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Page(HTMLParser):
    """The elements of a page; one that is not closed, or closed twice, is an error."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.text = text
        self.tags = Counter()
        self.attributes = []
        self.headings = {}
        self.rows = {}
        self.words = []
        self.styles = []
        self._open = []
        self._heading = ""
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag != "meta":
            self._open.append((tag, dict(attrs)))
        if tag == "th" and dict(attrs).get("scope") == "rowgroup":
            self.rows.setdefault(self._heading, []).append("")

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "style":
            self.styles.append(data)
        elif tag == "h2":
            self._heading = data
        elif tag == "th" and attributes.get("scope") == "rowgroup":
            self.rows[self._heading][-1] += data
        self.words.append(data.strip())

    def values(self, *names):
        return [value for _, name, value in self.attributes if name in names]


def page(results, path):
    write_report(results, path)
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A real run over a grid, in several processes, in rounds, long enough for a timeline."""
    directory = tmp_path_factory.mktemp("bench")
    measured = [
        Case(
            method="threads", direct=False, block_bytes=block_bytes, depth=depth, processes=2,
            seconds=0.4,
        )
        for block_bytes in (MIB // 4, MIB)
        for depth in (1, 4)
    ]  # fmt: skip
    measured.append(Case(pattern="read", method="posix", direct=False, depth=1))
    made = Results(
        kind="io", machine=facts.machine(), disk=facts.disk(directory), settings={"rounds": 2}
    )
    made.cases = {case.label: case.as_json() for case in measured}
    made.measurements = [
        run(case, directory / "work", 4 * MIB, seed=1, verifies=False, round_index=number)
        for number in range(2)
        for case in measured
    ]
    return made


def copied(results, **changes):
    """A copy to change."""
    measurements = [dataclasses.replace(one) for one in results.measurements]
    return dataclasses.replace(results, **{"measurements": measurements, **changes})


def renamed(results, names):
    """The same measurements under other labels."""
    labels = dict(zip(results.cases, names, strict=False))
    made = copied(results, cases={labels.get(k, k): v for k, v in results.cases.items()})
    for one in made.measurements:
        one.case = labels.get(one.case, one.case)
    return made


def assert_holds_everything(found):
    """A page uses no network and runs no script."""
    for value in found.values("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
        assert value.startswith("#")
    addresses = re.findall(r"url\(([^)]*)\)", " ".join([*found.styles, *found.values("style")]))
    addresses += re.findall(r"url\(([^)]*)\)", " ".join(found.values("clip-path", "fill")))
    assert all(address.startswith("#") for address in addresses)
    assert "@import" not in "".join(found.styles)
    ran = {"script", "iframe", "object", "embed", "link", "base", "form", "img", "image"}
    assert not ran & set(found.tags)
    assert not [name for _, name, _ in found.attributes if name.startswith("on")]
    assert "default-src 'none'; style-src 'unsafe-inline'" in found.values("content")


def ids(found):
    return found.values("id")


@pytest.fixture(scope="module")
def shown(results, tmp_path_factory):
    return page(results, tmp_path_factory.mktemp("page") / "page.html")


def test_nothing_is_asked_of_a_network(shown):
    assert_holds_everything(shown)


def test_identifiers_are_those_of_one_element_and_lead_somewhere(shown):
    assert max(Counter(ids(shown)).values()) == 1
    targets = {value[1:] for value in shown.values("href", "xlink:href")}
    clips = {value[5:-1] for value in shown.values("clip-path")}
    assert targets
    assert clips
    assert targets | clips <= set(ids(shown))


def test_every_case_is_in_the_tables(results, shown):
    for table in ("Rates", "Latency by case", "Requests and files"):
        assert shown.rows[table] == list(results.cases)
    several = [label for label, case in results.cases.items() if case["processes"] > 1]
    assert shown.rows["Totals and means"] == several


def test_figures_are_those_of_the_results(results, shown):
    for case in results.cases:
        rate = results.spread(case, "penstock", lambda one: one.durable_gb_per_second)
        assert f"{rate.median:.3f}" in shown.words
        assert f"[{rate.least:.3f}, {rate.most:.3f}]" in shown.words
    assert results.machine["kernel"] in shown.words
    assert str(results.disk["directory"]) in shown.words


def test_plots_are_there_and_say_what_they_show(results, shown):
    labels = [
        value for tag, name, value in shown.attributes if (tag, name) == ("svg", "aria-label")
    ]
    assert shown.values("role").count("img") == shown.tags["svg"] == len(labels)
    kinds = Counter(label.partition(",")[0] for label in labels)
    # A read that is over before it has a timeline is drawn all the same.
    assert kinds == {
        "Throughput": 2,
        "Throughput over time": 2,
        "Latency by percentile": 2,
        "GB/s by block and requests in flight": 1,
    }
    # Letters are letters.
    assert "256K x 4" in "".join(shown.words)
    assert shown.tags["text"] > 50


def test_light_and_dark_have_every_colour(shown):
    (style,) = shown.styles
    light, _, dark = style.partition("@media screen and (prefers-color-scheme: dark)")
    for name, shades in COLOURS.items():
        assert f"--{name}: {shades.light}" in light
        assert f"--{name}: {shades.dark}" in dark
    # No plot has a colour of its own that one of the two does not show.
    drawn = " ".join(shown.values("style"))
    assert "var(--series-0)" in drawn
    assert not [shades.light for shades in COLOURS.values() if shades.light in drawn]
    assert len({shades.light for shades in COLOURS.values()}) == len(COLOURS)
    # The cells of a heat map are the same in both, and so are the numbers in them.
    assert "#010101" in drawn


def test_names_and_notes_are_words_and_nothing_else(results, tmp_path):
    hostile = renamed(results, HOSTILE)
    hostile.machine = {"kernel": HOSTILE[0], HOSTILE[1]: {"x": HOSTILE[2]}, "command": HOSTILE}
    hostile.disk = {"directory": HOSTILE[1]}
    hostile.created = HOSTILE[0]
    hostile.kind = HOSTILE[1]
    for one in hostile.measurements:
        one.notes = list(HOSTILE)
        one.setup = HOSTILE[0]
        one.by = HOSTILE[1]
    found = page(hostile, tmp_path / "page.html")
    assert_holds_everything(found)
    assert max(Counter(ids(found)).values()) == 1
    assert HOSTILE[0] in found.words
    assert HOSTILE[2] in found.words
    assert found.rows["Rates"][0] == HOSTILE[0]


def test_a_case_that_failed_is_there_with_its_error(results, tmp_path):
    broken = copied(results)
    failed = next(iter(results.cases))
    for one in broken.measurements:
        if one.case == failed:
            one.error = "no room <b>left</b>"
    found = page(broken, tmp_path / "page.html")
    assert found.rows["Rates"] == list(results.cases)
    assert "no room <b>left</b>" in found.words
    assert found.tags["b"] == 0
    assert "2 measurements failed" in " ".join(" ".join(found.words).split())


def test_what_there_is_nothing_for_is_left_out(tmp_path):
    empty = Results(kind="io", machine={}, disk={}, settings={})
    found = page(empty, tmp_path / "empty.html")
    assert found.tags["svg"] == found.tags["table"] == 0
    only = Results(kind="checkpoint", machine={}, disk={}, settings={}, cases={"save": {}})
    only.measurements = [
        Measurement(case="save", by="penstock", round_index=0, error="it broke"),
        # Moved nothing, in no time.
        Measurement(case="save", by="torch.save", round_index=0),
    ]
    found = page(only, tmp_path / "only.html")
    assert found.tags["svg"] == 0
    assert found.rows["Rates"] == ["save"]
    assert "Totals and means" not in found.words


def test_passes_have_bars(tmp_path):
    made = Results(kind="checkpoint", machine={}, disk={}, settings={})
    made.cases = {
        f"save, 8b, pass {number}": {"operation": "save", "pass": number} for number in (1, 2, 3)
    }
    made.measurements = [
        Measurement(case=case, by=by, round_index=number, nbytes=10**9, seconds=1 + number)
        for case in made.cases
        for number in range(2)
        for by in ("penstock", "torch.save")
    ]
    made.measurements.append(Measurement(case="save, 8b, pass 2", by="dcp", round_index=0))
    found = page(made, tmp_path / "page.html")
    assert "GB/s of each pass, save, 8b" in found.values("aria-label")
    # All bytes in all the time, and the mean of the rates.
    assert f"{2 / 3:.3f}" in found.words
    assert f"{(1 + 1 / 2) / 2:.3f}" in found.words


@pytest.mark.parametrize(
    ("preset", "shapes"),
    [
        ("quick", []),
        ("paper", []),
        ("ds_io", [("block", 2, "threads", 4)] * 4),
        ("gdsio", [("block", 5, "threads", 7)]),
    ],
)
def test_a_preset_that_is_a_grid_has_heat_maps(preset, shapes):
    made = Results(kind="io", machine={}, disk={}, settings={})
    made.cases = {case.label: case.as_json() for case in cases.preset(preset)}
    made.measurements = [
        Measurement(case=case, by="penstock", round_index=0, nbytes=10**9, seconds=1 + number)
        for number, case in enumerate(made.cases)
    ]
    found = grids(made)
    assert shapes == [
        (grid.row_name, len(grid.rows), grid.column_name, len(grid.columns)) for grid in found
    ]
    assert len({grid.title for grid in found}) == len(found)
    rates = [rate for grid in found for row in grid.rates for rate in row]
    assert None not in rates
    assert len(rates) == (len(made.cases) if shapes else 0)


def test_of_very_many_cases_some_are_drawn_and_that_is_said(results, tmp_path):
    many = copied(results, cases={}, measurements=[])
    some = next(one for one in results.measurements if one.timeline_bytes)
    for number in range(200):
        label = f"write, number {number}"
        many.cases[label] = {"pattern": "write"}
        many.measurements.append(
            dataclasses.replace(some, case=label, seconds=some.seconds * (1 + number))
        )
    found = page(many, tmp_path / "page.html")
    assert found.rows["Rates"] == list(many.cases)
    drawn = [word for word in found.words if re.fullmatch(r"number \d+", word)]
    assert {"number 0", "number 199"} <= set(drawn)
    # Lines have colours, of which there are few; bars need none.
    assert f"({len(SERIES)} of 200)" in found.words
    assert f"({BARS_MAX} of 200)" in found.words
    assert len(set(drawn)) < BARS_MAX + len(SERIES)


def test_a_ratio_to_fio_is_there_where_fio_is(results, tmp_path):
    both = copied(results)
    for one in results.measurements:
        both.measurements.append(dataclasses.replace(one, by="fio", seconds=2 * one.seconds))
    for one in both.measurements:
        one.sync_seconds = 0.0
    found = page(both, tmp_path / "page.html")
    assert "ratio to fio" in found.words
    assert "2.00" in found.words


def test_several_runs_are_below_each_other(results, tmp_path):
    found = page([results, results], tmp_path / "page.html")
    assert found.tags["article"] == 2
    assert max(Counter(ids(found)).values()) == 1


def penstock(*arguments, program=("-m", "penstock")):
    return subprocess.run(
        [sys.executable, *program, "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_the_page_of_a_run_is_that_of_its_file(tmp_path):
    directory, output, report, again = (tmp_path / name for name in ("d", "a.json", "a.html", "b"))
    directory.mkdir()
    arguments = ["--direct", "off", "--method", "threads", "--size", "1M", "--rounds", 1]
    done = penstock("io", directory, *arguments, "--output", output, "--report", report)
    assert done.returncode == 0, done.stderr
    assert penstock("report", output, again).returncode == 0
    assert again.read_text() == report.read_text()
    refused = penstock("report", output, output)
    assert refused.returncode == 2
    assert "would be overwritten" in refused.stderr
    assert Results.read(output).cases
    assert penstock("report", report, again).returncode == 1


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_without_its_libraries_nothing_is_measured(tmp_path, library):
    program = f"import sys; sys.modules[{library!r}] = None; from penstock.cli import main; main()"
    report, output = tmp_path / "page.html", tmp_path / "a.json"
    done = penstock(
        "io", tmp_path, "--size", "1M", "--output", output, "--report", report,
        program=("-c", program),
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install 'penstock[bench]'" in " ".join(done.stderr.split())
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path):
    output = tmp_path / "a.json"
    for path in (tmp_path / "nowhere" / "page.html", tmp_path):
        done = penstock("io", tmp_path, "--size", "1M", "--output", output, "--report", path)
        assert done.returncode == 2
        assert "cannot be written" in " ".join(done.stderr.split())
    assert os.listdir(tmp_path) == []
    page = tmp_path / "page.html"
    page.write_text("what was there")
    assert penstock("io", tmp_path, "--size", "900T", "--report", page).returncode == 2
    assert page.read_text() == "what was there"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")
def test_chromium_shows_it_light_and_dark(results, tmp_path):
    from matplotlib import image

    path = tmp_path / "page.html"
    write_report(results, path)
    for is_light in (False, True):
        shot = tmp_path / f"{is_light}.png"
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1000,2400",
            f"--blink-settings=preferredColorScheme={int(is_light)}", f"--screenshot={shot}",
            path.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        tell(done.stderr)
        pixels = (image.imread(shot)[..., :3] * 255).round().astype(int).reshape(-1, 3)
        counted = Counter(f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in pixels)
        ((ground, pixels_of_ground),) = counted.most_common(1)
        theme = 0 if is_light else 1
        assert ground == COLOURS["paper"][theme]
        assert pixels_of_ground > 0.6 * len(pixels)
        # The plots have come along.
        assert counted[COLOURS["series-0"][theme]] > 100
        assert counted[COLOURS["series-0"][1 - theme]] == 0
