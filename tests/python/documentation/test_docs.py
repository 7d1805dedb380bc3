"""The documentation: its code runs, its links resolve, its charts are current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forks
from conftest import REPOSITORY, slow, tell
from docs.charts.drawing import drawn
from docs.charts.figures import charts, figures
from pages import anchors, blocks, links, named, pages
from ranks import environments_of

SHELLS = ("sh",)
TORCHRUN = re.compile(r"((?:\w+=\S+ )*)torchrun (?:--standalone )?--nproc-per-node (\d+) (.+)$")
# Generous: only a hang reaches it.
TIMEOUT_SECONDS = 240
PAGES = pages()
WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
WITH_CODE += [
    page
    for page in PAGES
    if page not in WITH_CODE and any(block.language in SHELLS for block in blocks(page))
]
# Pages whose programs import frameworks or start ranks many times.
SLOW_NAMES = {
    "docs/coming-from/dcp.md",
    "docs/coming-from/lightning.md",
    "docs/cookbook.md",
    "docs/huggingface.md",
    "docs/tutorials/many-ranks.md",
    "docs/tutorials/resume.md",
    "docs/tutorials/serving.md",
}
SLOW = [page for page in WITH_CODE if named(page) in SLOW_NAMES]
QUICK = [page for page in WITH_CODE if page not in SLOW]


@pytest.fixture
def left_as_it_was():
    """Restores the process-wide state that a page's code changes."""
    import torch
    import torch.distributed as dist

    environment, threads = dict(os.environ), torch.get_num_threads()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.parametrize("page", QUICK + slow(*SLOW), ids=named)
@pytest.mark.timeout(600)  # a page's programs each begin by importing PyTorch
@pytest.mark.usefixtures("left_as_it_was")
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__page__"}
    run = [block for block in blocks(page) if block.not_run is None]
    if any("s3://bucket" in block.text for block in run):
        request.getfixturevalue("bucket")
    for block in run:
        if block.title is not None:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            # Line numbers are those of the page.
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(page), "exec", dont_inherit=True), namespace)
        elif block.language in SHELLS:
            run_in_shell(page, block)


def run_in_shell(page, block):
    """Runs the lines of a block, as a reader would one after the other."""
    where = f"{named(page)}:{block.line}"
    rest = []
    for line in block.text.splitlines():
        if launched := TORCHRUN.match(line):
            by_bash("\n".join(rest), where)
            rest = []
            by_ranks(*launched.groups(), where)
        else:
            rest.append(line)
    by_bash("\n".join(rest), where)


def by_bash(text, where):
    if not text.strip():
        return
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env=os.environ | {"PATH": programs},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{where}: {done.returncode}\n{done.stdout}\n{done.stderr}"


def by_ranks(settings, ranks, program, where):
    """Runs ranks as torchrun does, in forks: each rank takes seconds to import PyTorch."""
    own = dict(setting.split("=") for setting in settings.split())
    processes = [
        forks.RankPopen(
            program.split(),
            env=os.environ | own | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for environment in environments_of(int(ranks))
    ]
    said = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * int(ranks), f"{where}: {said}"


def test_code_that_is_not_run_says_why():
    shown = [
        (page, block)
        for page in PAGES
        for block in blocks(page)
        if not block.is_hidden and block.language in ("python", *SHELLS)
    ]
    not_run = [(page, block) for page, block in shown if block.not_run is not None]
    for page, block in not_run:
        tell(f"{named(page)}:{block.line}: not run: {block.not_run}")
    tell(f"{len(shown) - len(not_run)} of {len(shown)} blocks are run")
    assert len(not_run) <= len(shown) / 4


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_are_marked_as_such(page):
    """Marking ensures that no command is missed: `sh` is run, `text` is not."""
    unmarked = [
        f"{named(page)}:{block.line}"
        for block in blocks(page)
        if block.language not in (*SHELLS, "text")
        and any(line.startswith("penstock ") for line in lines_of(block))
    ]
    assert not unmarked


def lines_of(block):
    return block.text.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    """As files on a code forge; `make docs` checks the links of the site."""
    broken = []
    for line, target in links(page):
        path, _, anchor = target.partition("#")
        if "://" in path or path.startswith("mailto:"):
            continue
        linked = (page.parent / path).resolve() if path else page
        if not linked.exists() or not linked.is_relative_to(REPOSITORY):
            broken.append(f"{named(page)}:{line}: {target}: not there")
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
            broken.append(f"{named(page)}:{line}: {target}: no such heading")
    assert not broken, "\n".join(broken)


def test_the_site_has_all_pages(tmp_path):
    from docs.site.__main__ import assemble

    assemble(tmp_path)
    assert (tmp_path / "pages" / "reference" / "command-line.md").stat().st_size > 10_000
    assert (
        "penstock.CheckpointStore" in (tmp_path / "pages" / "reference" / "stores.md").read_text()
    )


def test_charts_are_of_the_figures_in_the_pages():
    """`make charts` redraws them."""
    stale = [chart.name for chart in charts() if drawn(chart) != figures(chart)]
    assert not stale
    unseen = [
        chart.name
        for chart in charts()
        if f"charts/{chart.name}.svg" not in (REPOSITORY / "docs" / chart.page).read_text()
    ]
    assert not unseen
