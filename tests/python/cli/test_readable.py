"""Readable output of the command line: examples, short names, short lists, limited colour."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import penstock
from penstock.cli import cli
from penstock.cli.folding import fold
from penstock.common.console import console, table
from penstock.common.file_names import FileNames
from penstock.reports import Problem, VerifyResult

pytestmark = pytest.mark.quick

ATTEMPT = re.compile(r"[0-9a-f]{32}")


def command_lines(group=cli, path=("penstock",)):
    """Yields every command and group with the words that invoke it."""
    yield path, group
    if isinstance(group, click.Group):
        for name in group.list_commands(click.Context(group)):
            yield from command_lines(group.get_command(click.Context(group), name), (*path, name))


COMMANDS = dict(command_lines())


def shown(*arguments, columns=80, code=None):
    runner = CliRunner(env={"COLUMNS": None if columns is None else str(columns)})
    done = runner.invoke(cli, list(map(str, arguments)), standalone_mode=False)
    assert code in (None, done.exit_code or done.return_value or 0), done.output
    return done.output


# ---- Examples


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_help_ends_with_an_example_that_is_understood(path, tmp_path, monkeypatch):
    # Commands with an output path check that it can be written.
    monkeypatch.chdir(tmp_path)
    text = shown(*path[1:], "--help", code=0)
    assert all(len(line) <= 80 for line in text.splitlines())
    _, heading, lines = text.rstrip().rpartition("Example")
    assert heading
    first, *examples = lines.splitlines()
    assert first in (":", "s:")
    assert examples
    for example in examples:
        assert example.startswith("    penstock ")
        words = shlex.split(example)
        assert tuple(words[: len(path)]) == path
        # The example of a group is that of a command in it.
        typed = max((one for one in COMMANDS if tuple(words[: len(one)]) == one), key=len)
        assert not isinstance(COMMANDS[typed], click.Group)
        arguments = words[len(typed) :]
        if arguments != ["--help"]:
            # Raises for an unknown option or value.
            COMMANDS[typed].make_context(typed[-1], arguments, parent=click.Context(cli))


@pytest.mark.parametrize(
    "path", [path for path, one in COMMANDS.items() if isinstance(one, click.Group)], ids=" ".join
)
def test_the_list_of_commands_is_not_cut_short(path):
    text = shown(*path[1:], "--help", code=0)
    assert "..." not in text.partition("Commands:")[2].partition("Example")[0]


# ---- Names of files


def test_a_name_has_no_attempt_where_it_is_alone():
    attempt = "0123456789abcdef" * 2
    names = FileNames("/c", [f"shard-00000-00.{attempt}.safetensors"])
    text = f"/c/shard-00000-00.{attempt}.safetensors: gone; model-00001-of-00002.safetensors"
    assert names.short(text) == "shard-00000-00: gone; model-00001-of-00002.safetensors"


def test_files_of_several_saves_keep_names_of_their_own():
    first, second, third = "a" * 32, "b" * 32, "a" * 20 + "c" * 12
    whole = [f"shard-00000-00.{attempt}.safetensors" for attempt in (first, second, third)]
    other = f"part-00000.{first}.json"
    names = FileNames("/c", [*whole, other])
    short = [names.short(name) for name in whole]
    assert len(set(short)) == 3
    assert short[1] == "shard-00000-00.bbbbbbbb"
    assert short[0].startswith("shard-00000-00.aaaaaaaa")
    assert names.short(other) == "part-00000"


@pytest.fixture
def damaged(tmp_path):
    """Saves three steps: step 1 has a flipped byte, step 2 lacks its shard, step 3 is good."""
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (1, 2, 3):
        store.save(step, {"model": {"w": torch.ones(4000), "v": torch.ones(8)}})
    info = penstock.inspect(store.path(1)).tensors[0]
    with open(Path(store.path(1), info.file), "r+b") as file:
        file.seek(info.begin)
        file.write(b"x")
    next(Path(store.path(2)).glob("shard-*")).unlink()
    return store


def test_no_attempt_is_shown_and_json_has_whole_names(damaged, tmp_path):
    broken = damaged.path(1)
    for arguments in (
        ("ls", damaged.root),
        ("verify", damaged.root),
        ("verify", broken, "--explain"),
        ("scrub", damaged.root, "--max-age", 0),
        ("salvage", broken, tmp_path / "out"),
    ):
        text = shown(*arguments)
        assert "shard-00000-00" in text or arguments[0] == "scrub"
        assert not ATTEMPT.search(re.sub(r"\s", "", text)), text
        assert all(len(line) <= 80 for line in text.splitlines() if str(tmp_path) not in line)
    text = shown("verify", damaged.root, "--json", code=1)
    assert penstock.inspect(broken).files[2].name in text


# ---- Long lists


def names_of(count):
    return [(f"layers.{number}.w", "float32") for number in range(count)]


@pytest.mark.parametrize(
    ("named", "lines"),
    [
        (names_of(32), {"layers.{0..31}.w": 32}),
        (names_of(1), {"layers.0.w": 1}),
        ([("a.1", 0), ("a.3", 0), ("a.5", 0)], {"a.{1..5..2}": 3}),
        ([("a.1", 0), ("a.2", 1), ("a.3", 0)], {"a.{1,3}": 2, "a.2": 1}),
        ([("a.01", 0), ("a.02", 0), ("a", 0)], {"a.01": 1, "a.02": 1, "a": 1}),
        (
            [(f"l.{a}.e.{b}", 0) for a in range(4) for b in range(8)] + [("l.4.e.0", 0)],
            {"l.{0..3}.e.{0..7}": 32, "l.4.e.0": 1},
        ),
        ([(f"a.{n * n}", 0) for n in range(1, 9)], {"a.{1,4,9,16,25,...,64}": 8}),
        ([("9" * 5000, 0)], {"9" * 5000: 1}),
    ],
)
def test_names_that_differ_in_numbers_alone_are_one_line(named, lines):
    found = fold(named)
    assert {line.name: len(line.indices) for line in found} == lines
    assert sorted(index for line in found for index in line.indices) == list(range(len(named)))


def test_inspect_has_a_line_for_all_layers_and_all_on_request(tmp_path):
    state = {"layers": {str(n): {"w": torch.zeros(2, 3)} for n in range(32)}, "head": torch.ones(4)}
    penstock.save(tmp_path / "c", state)
    text = shown("inspect", tmp_path / "c", code=0)
    (line,) = [one.split() for one in text.splitlines() if "layers" in one]
    assert line == ["layers.{0..31}.w", "32", "float32", "2", "x", "3", "768", "bytes"]
    everything = shown("inspect", tmp_path / "c", "--all", code=0)
    assert sum("layers." in one for one in everything.splitlines()) == 32


def test_diff_lists_the_first_of_each_kind_and_counts_the_rest(tmp_path):
    count = 1300
    for name, value in (("a", 0.0), ("b", 1.0)):
        own = {f"{name}{n}": n for n in range(50)}
        penstock.save(
            tmp_path / name, {"w": {str(n): torch.full((1,), value) for n in range(count)}} | own
        )
    text = shown("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert text.count("and 30 more; --all lists them") == 2
    assert text.count("and 1,280 more; --all lists them") == 1
    assert len(text.splitlines()) < 90
    everything = shown("diff", tmp_path / "a", tmp_path / "b", "--all", code=1)
    assert " more" not in everything
    assert sum(line.startswith("w.") for line in everything.splitlines()) == count


# ---- On a terminal or not


LONG = "encoder.layers.0.attention_with_a_name.that_takes_more_room.than_a_terminal_has.weight"


def test_without_a_terminal_no_name_is_broken(tmp_path):
    penstock.save(tmp_path / "c", {LONG: torch.zeros(3)})
    for columns, has_it in ((None, True), (80, False)):
        assert (LONG in shown("inspect", tmp_path / "c", columns=columns, code=0)) == has_it


def test_sentences_fold_before_names(capsys):
    rows = table("tensor", "problem", folded=["tensor", "problem"])
    rows.add_row("x" * 50, "many words that find a place in several lines without being broken")
    console(width=80).print(rows)
    out = capsys.readouterr().out
    assert "x" * 50 in out
    assert "without" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def on_a_terminal(*arguments, errors, **environment):
    """Returns the output of a command on a terminal, with or without standard error."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "penstock", *map(str, arguments)],
        stdin=theirs, stdout=theirs, stderr=theirs if errors else subprocess.DEVNULL,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "80"} | environment,
    ) as process:  # fmt: skip
        os.close(theirs)
        written = []
        try:
            while part := os.read(ours, 1 << 16):
                written.append(part)
        except OSError:
            # Linux returns EIO once no process has the terminal open for writing.
            pass
        process.wait()
    os.close(ours)
    return b"".join(written).decode()


def test_no_color_is_honoured_and_nothing_is_said_by_colour_alone(damaged, tmp_path):
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    for arguments, says, errors in (
        (("verify", damaged.root), "1 problem", False),
        (("ls", tmp_path / "nowhere"), "error: ", True),
    ):
        plain = on_a_terminal(*arguments, errors=errors, NO_COLOR="1")
        coloured = on_a_terminal(*arguments, errors=errors)
        assert colour.search(coloured)
        assert not colour.search(plain)
        words = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text) for text in (plain, coloured)]
        assert words[0] == words[1]
        assert says in words[0]


# ---- Reports


def test_reports_are_lines_for_people_and_their_repr_is_one(damaged, tmp_path):
    loads = []
    store = penstock.CheckpointStore(tmp_path / "other")
    saved = store.save(7, {"net": {"w": torch.ones(100)}, "lr": 0.1})
    store.load(report=loads.append)
    found = {
        "saved": saved,
        "loaded": loads[0],
        "verified": penstock.verify(damaged.path(1)),
        "explained": penstock.explain(damaged.path(1)),
        "salvaged": penstock.salvage(damaged.path(1), tmp_path / "out"),
        "scrubbed": damaged.scrub(max_age_seconds=0),
        "would delete": damaged.retain(dry_run=True),
        "checkpoint": penstock.inspect(tmp_path / "out"),
        "exported": penstock.export(store.path(7), tmp_path / "exported", key="net"),
        "converted": converted(tmp_path),
    }
    for first, report in found.items():
        lines = str(report).splitlines()
        assert lines[0].startswith(first)
        assert len(lines) > 1
        assert repr(report).startswith(type(report).__name__ + "(")
        assert "\n" not in repr(report)
        assert not ATTEMPT.search(str(report))
    assert "past the page cache" in str(saved) or "through the page cache" in str(saved)
    assert "1 problem" in str(found["verified"])


def converted(directory):
    torch.save({"w": torch.ones(3)}, directory / "old.pt")
    return penstock.convert(directory / "old.pt", directory / "converted")


def test_a_report_of_a_thousand_problems_can_be_read():
    problems = tuple(
        Problem(file="f\x1b[31m", offset=n, tensor=None, message="wrong") for n in range(1000)
    )
    result = VerifyResult(
        path="/c", ok=False, problems=problems, bytes_checked=1, files=1, tensors=1, seconds=1.0
    )
    text = str(result)
    assert "and 990 more" in text
    assert len(text.splitlines()) < 20
    assert "\x1b" not in text
