"""The command line: the output of each command for people and programs, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
import torch

import penstock
import three_ranks
from conftest import run_child
from penstock import cli
from penstock.cli import paths, units
from penstock.errors import StorageError

pytestmark = pytest.mark.quick

COMMANDS_WITH_A_PATH = ["ls", "inspect", "verify", "diff"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Returns a function that runs a command line: exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


@pytest.fixture
def run_json(run):
    """Returns a function that runs a command with --json: exit code, parsed result."""

    def run_json(*arguments):
        code, out, err = run(*arguments, "--json")
        assert err == ""
        return code, json.loads(out)

    return run_json


@pytest.fixture
def store(tmp_path):
    """Steps 10 and 20 complete, 30 damaged, 40 never finished."""
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (10, 20, 30, 40):
        store.save(step, {"model": {"w": torch.full((4, 3), float(step))}, "step": step})
    shard_of(store.path(30)).unlink()
    Path(store.path(40), "manifest.json").unlink()
    return store


def shard_of(path):
    return next(Path(path).glob("shard-*"))


def flip_bit(file, offset):
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


# ---- The command line as such


def test_version_and_help_are_fine(run):
    assert run("--version") == (0, f"penstock, version {penstock.__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ["demo", *COMMANDS_WITH_A_PATH])


HEAVY = {"numpy", "torch", "rich", "scipy", "matplotlib", "jinja2", "penstock._native"}
GROUPS = [[], ["bench"], ["trace"]]


def imported_by(command_lines):
    """Returns the slow imports of each command line, run in one process."""
    script = """
        import json, sys
        from click.testing import CliRunner
        from penstock.cli import cli
        command_lines, heavy = json.loads(sys.argv[1])
        for command_line in command_lines:
            done = CliRunner().invoke(cli, command_line)
            assert done.exit_code == 0, done.output
        print(json.dumps([name for name in heavy if name in sys.modules]))
        """
    return set(run_child(script, json.dumps([command_lines, sorted(HEAVY)], default=str)))


def test_the_lists_of_commands_import_nothing_heavy():
    assert imported_by([["--version"], *([*group, "--help"] for group in GROUPS)]) == set()


def test_the_help_of_a_command_imports_what_prints_tables_and_our_own_alone():
    lines = [[command, "--help"] for command in cli.cli.list_commands(None)]
    assert imported_by(lines) <= {"rich", "penstock._native"}


def test_looking_at_checkpoints_imports_no_torch(tmp_path):
    root = tmp_path / "store"
    store = penstock.CheckpointStore(root)
    for step in (1, 2):
        store.save(step, {"w": np.full(3, step)})
    lines = [[command, root] for command in ("ls", "inspect", "verify", "scrub", "sweep", "diff")]
    lines[-1].append(store.path(2))
    lines.append(["verify", "--explain", store.path(1)])
    assert imported_by(lines) & {"torch", "scipy", "matplotlib", "jinja2"} == set()


@pytest.mark.parametrize("group", GROUPS, ids=" ".join)
def test_a_list_says_of_each_command_what_its_own_help_says(group):
    found = cli.cli
    for name in group:
        found = found.get_command(None, name)
    context = click.Context(found)
    commands = {name: found.get_command(context, name) for name in found.list_commands(context)}
    plain = click.Group(commands=commands)
    listed, expected = (click.HelpFormatter(width=200) for _ in range(2))
    found.format_commands(context, listed)
    plain.format_commands(context, expected)
    assert listed.getvalue() == expected.getvalue()


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["ls"], ["verify", "x", "--loud"], ["diff", "x"]]
)
def test_a_wrong_command_line_exits_with_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: penstock" in err


def test_a_wrong_setting_in_the_environment_is_named(run, monkeypatch, store):
    monkeypatch.setenv("PENSTOCK_ENGINE", "steam")
    code, out, err = run("verify", store.root)
    assert (code, out) == (2, "")
    assert "steam" in err


@pytest.mark.parametrize("command", COMMANDS_WITH_A_PATH)
@pytest.mark.parametrize("content", [None, "a file"], ids=["missing", "file"])
def test_a_path_without_a_checkpoint_is_one_message_and_exit_1(run, tmp_path, command, content):
    path = tmp_path / "path"
    if content is not None:
        path.write_text(content)
    code, out, err = run(command, *[path] * (2 if command == "diff" else 1), "--json")
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert str(path) in err
    assert "Traceback" not in err


def test_ctrl_c_exits_with_130_without_a_traceback():
    script = """
import signal, sys
import penstock
from penstock import cli

def verify(*_, **__):
    print("ready", flush=True)
    signal.pause()

penstock.verify = verify
sys.argv = ["penstock", "verify", "."]
cli.main()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err.strip() == ""


def test_python_m_penstock_is_the_command_and_pipes_get_no_colour(store):
    environment = os.environ | {"TERM": "xterm-256color"}
    ran = subprocess.run(
        [sys.executable, "-m", "penstock", "ls", store.root],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    assert "newest" in ran.stdout
    assert "\x1b" not in ran.stdout + ran.stderr


@pytest.mark.parametrize("command", COMMANDS_WITH_A_PATH)
def test_every_key_of_the_json_is_in_the_help(run, run_json, store, command):
    other = Path(store.root).parent / "other"
    penstock.save(other, {"model": {"w": torch.zeros(4, 3)}, "step": 10.5})
    paths = [store.path(10), other] if command == "diff" else [store.root]
    _, result = run_json(command, *paths, *["--values"] * (command == "inspect"))
    help_text = run(command, "--help")[1]
    data = {"metadata", "aliases", "values"} if command == "inspect" else set()
    for key in keys_of(result, data):
        assert re.search(rf"\b{key}\b", help_text), key


def keys_of(result, data):
    """Yields all keys of the nested objects, except below the keys that hold data."""
    if isinstance(result, dict):
        for key, value in result.items():
            yield key
            if key not in data:
                yield from keys_of(value, data)
    elif isinstance(result, list):
        for value in result:
            yield from keys_of(value, data)


# ---- ls


def test_ls_lists_every_step_with_its_state(run, run_json, store):
    code, result = run_json("ls", store.root)
    assert code == 0
    assert (result["root"], result["newest"]) == (store.root, 20)
    states = {row["step"]: row["state"] for row in result["steps"]}
    assert states == {10: "complete", 20: "complete", 30: "damaged", 40: "incomplete"}
    newest = result["steps"][1]
    assert (newest["tensors"], newest["tensor_bytes"], newest["reason"]) == (1, 48, None)
    assert newest["id"] == penstock.inspect(store.path(20)).id
    damaged, incomplete = result["steps"][2:]
    assert shard_name_in(damaged["reason"])
    assert damaged["tensors"] is incomplete["tensors"] is None
    assert incomplete["bytes"] > 48

    code, out, _ = run("ls", store.root)
    assert code == 0
    assert next(line for line in out.splitlines() if "newest" in line).split()[0] == "20"
    assert all(len(line) <= 80 for line in out.splitlines())


def shard_name_in(text):
    return "shard-00000-00." in text


@pytest.mark.parametrize("columns", [1, 20, 40, 80])
def test_ls_keeps_its_steps_however_narrow_the_terminal(run, store, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run("ls", store.root)
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()[:1].isdigit()}
    assert rows.keys() >= {"10", "20", "30", "40"}
    assert "complete" in rows["10"]
    assert "MB" in rows["10"] or "kB" in rows["10"]


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_no_table_loses_what_it_is_about(run, store, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = run("inspect", store.path(10))
    assert "float32" in out
    _, out, _ = run("verify", store.path(30))
    assert "problem" in out
    _, out, _ = run("scrub", store.root)
    for step in ("10", "20", "30"):
        assert re.search(rf"^ *{step} ", out, re.MULTILINE), out


def test_ls_calls_a_step_damaged_whose_part_is_unreadable(run_json, store):
    flip_bit(next(Path(store.path(20)).glob("part-*")), 5)
    _, result = run_json("ls", store.root)
    assert result["newest"] == 10
    assert result["steps"][1]["state"] == "damaged"
    assert "part-00000" in result["steps"][1]["reason"]


def test_ls_of_an_empty_directory_is_no_error(run, run_json, tmp_path):
    assert run("ls", tmp_path)[0] == 0
    assert run_json("ls", tmp_path) == (
        0,
        {"root": str(tmp_path), "newest": None, "steps": [], "quarantined": []},
    )


def test_ls_of_a_checkpoint_points_to_inspect(run, store):
    code, _, err = run("ls", store.path(10))
    assert code == 1
    assert "penstock inspect" in err


# ---- inspect


def test_inspect_tells_everything_about_a_checkpoint(run_json, tmp_path):
    w = torch.zeros(3, 4, dtype=torch.bfloat16)
    state = {"w": w, "tied": w, "n": np.arange(3), "lr": 0.1, "nan": float("nan"), "none": None}
    report = penstock.save(tmp_path / "c", state, step=7, metadata={"run": "a"})
    code, result = run_json("inspect", tmp_path / "c", "--values")
    assert code == 0
    assert result["path"] == str(tmp_path / "c")
    assert (result["id"], result["step"]) == (report.checkpoint_id, 7)
    assert (result["bytes"], result["tensor_bytes"]) == (report.bytes, report.tensor_bytes)
    assert (result["metadata"], result["format_version"]) == ({"run": "a"}, 1)
    assert sum(file["bytes"] for file in result["files"]) == report.bytes
    kinds = {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in result["tensors"]}
    assert kinds == {"w": ("bfloat16", [3, 4]), "n": ("int64", [3])}
    assert result["aliases"] == {"tied": "w"}
    assert result["values"] == {"lr": "0.1", "nan": "nan", "none": "None"}


def test_inspect_shows_the_names_asked_for(run, run_json, tmp_path):
    state = {"model": {str(i): torch.zeros(2) for i in range(60)}, "lr": 0.1, "[x]": torch.ones(1)}
    penstock.save(tmp_path / "c", state)
    _, result = run_json("inspect", tmp_path / "c", "--keys", "model.1*", "--keys", "[x]")
    assert len(result["tensors"]) == 12
    assert result["values"] is None
    assert len(run_json("inspect", tmp_path / "c")[1]["tensors"]) == 61
    assert len(run_json("inspect", tmp_path / "c", "--limit", 5)[1]["tensors"]) == 5
    _, out, _ = run("inspect", tmp_path / "c", "--all", "--limit", 40)
    assert "40 of 61 tensors" in out
    for limits in (["--limit", 0], ["--all"], []):
        assert " of 61" not in run("inspect", tmp_path / "c", *limits)[1]


def test_inspect_of_a_store_shows_its_newest_complete_step(run, run_json, store):
    assert run_json("inspect", store.root)[1]["step"] == 20
    assert "newest complete step, 20" in run("inspect", store.root)[1]


def test_inspect_of_a_store_without_a_complete_step_says_so(run, tmp_path):
    (tmp_path / "step-0000000001").mkdir()
    code, _, err = run("inspect", tmp_path)
    assert code == 1
    assert "none of the steps" in err


def test_long_names_and_markup_are_shown_whole_within_80_columns(run, tmp_path):
    long = "encoder.layer_with_a_long_name." * 6 + "weight"
    penstock.save(tmp_path / "c", {long: torch.zeros(1), "[red]:smile:[/red]": torch.zeros(1)})
    _, out, _ = run("inspect", tmp_path / "c")
    assert all(len(line) <= 80 for line in out.splitlines())
    assert long in "".join(line.split(" ")[0] for line in out.splitlines())
    assert r"\[red]:smile:\[/red]" in out


# ---- verify


def test_verify_of_a_good_checkpoint_exits_with_0(run, run_json, store):
    code, result = run_json("verify", store.path(20))
    assert (code, result["ok"], result["incomplete"]) == (0, True, [])
    assert result["bytes_checked"] == penstock.inspect(store.path(20)).bytes
    code, out, _ = run("verify", store.path(20))
    assert code == 0
    assert "good" in out


def test_verify_of_a_store_checks_all_that_claims_to_be_complete(run, run_json, store):
    info = penstock.inspect(store.path(10)).tensors[0]
    flip_bit(Path(store.path(10), info.file), info.begin)
    code, result = run_json("verify", store.root)
    assert (code, result["ok"]) == (1, False)
    assert [checked["ok"] for checked in result["checkpoints"]] == [False, True, False]
    flipped = result["checkpoints"][0]["problems"][0]
    assert (flipped["file"], flipped["tensor"]) == (info.file, "model.w")
    assert flipped["offset"] <= info.begin
    assert result["incomplete"] == [store.path(40)]
    code, out, _ = run("verify", store.root)
    assert code == 1
    assert "model.w" in out
    assert "never finished" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_verify_of_a_store_without_a_finished_step_fails(run, tmp_path):
    (tmp_path / "step-0000000001").mkdir()
    code, _, err = run("verify", tmp_path)
    assert code == 1
    assert "nothing to verify" in err


# ---- verify --explain, salvage


@pytest.fixture
def damaged(store):
    """Damages one of two tensors of step 20; step 10 is verified."""
    state = {"a": torch.zeros(300), "b": torch.ones(4, 3), "lr": 0.5}
    store.save(20, state, overwrite=True)
    store.load(10)
    info = penstock.inspect(store.path(20)).tensors[1]
    flip_bit(Path(store.path(20), info.file), info.begin)
    return Path(store.path(20))


def test_explain_says_what_is_intact_and_where_to_go_back_to(run, run_json, damaged):
    code, result = run_json("verify", damaged, "--explain")
    assert (code, result["ok"], result["described_by"]) == (1, False, "whole")
    assert (result["intact"], result["hit"]) == (
        {"count": 1, "bytes": 1200}, {"count": 1, "bytes": 48},
    )  # fmt: skip
    hit = next(tensor for tensor in result["tensors"] if tensor["hit"])
    assert (hit["name"], hit["shape"]) == ("b", [4, 3])
    assert (result["earlier_step"], result["earlier_is_verified"]) == (10, True)
    code, out, _ = run("verify", damaged, "--explain")
    assert code == 1
    assert "10 (read back whole)" in out
    assert "penstock salvage" in out
    assert all(len(line) <= 80 for line in out.splitlines() if "penstock salvage" not in line)


def test_explain_names_missing_files_and_takes_one_checkpoint(run, run_json, store):
    _, result = run_json("verify", store.path(30), "--explain")
    assert shard_name_in(result["missing_files"][0])
    assert run("verify", store.root, "--explain")[0] == 2
    assert run_json("verify", store.path(10), "--explain")[0] == 0


@pytest.fixture
def damaged_ranks(tmp_path):
    """A checkpoint of three ranks: the first without its part, the others with a damaged tensor."""
    path = three_ranks.commit(tmp_path / "many", [three_ranks.tree_of(rank) for rank in range(3)])
    three_ranks.flip(path, "model.rows", 1)
    three_ranks.flip(path, "own", 2)
    three_ranks.file_of(path, "part", 0).unlink()
    return path


def test_explain_tells_what_is_left_of_many_ranks(run, run_json, damaged_ranks):
    code, result = run_json("verify", damaged_ranks, "--explain")
    assert (code, result["world_size"], result["ranks_lost"]) == (1, 3, [0])
    counts = {what: result[what]["count"] for what in ("intact", "unverified", "hit")}
    assert counts == {"intact": 3, "unverified": 2, "hit": 2}
    hit = [(tensor["name"], tensor["rank"]) for tensor in result["tensors"] if tensor["hit"]]
    assert hit == [("model.rows", None), ("own", 2)]
    code, out, _ = run("verify", damaged_ranks, "--explain")
    lines = [line.rstrip() for line in out.splitlines()]
    assert code == 1
    assert all(len(line) <= 80 for line in lines if "penstock salvage" not in line)
    assert "ranks          3, of which 0 lost its part" in lines
    # Counts come before names.
    places = [
        next(place for place, line in enumerate(lines) if line.startswith(start))
        for start in (
            "intact         3",
            "all ranks ",
            "rank 0 alone",
            "rank 2 alone",
            "model.rows",
        )
    ]
    assert places == sorted(places)
    assert "1 of 3 boxes, first [2:4, 0:4] of" in out
    assert lines[-1].endswith("OUT [--unverified]")


def test_salvage_names_small_files_that_are_lost(run, run_json, tmp_path):
    penstock.save(tmp_path / "bad", {"w": torch.ones(3)}, files={"config.json": b"{}"})
    for file in (tmp_path / "bad").glob("*config.json"):
        file.unlink()
    code, out, _ = run("salvage", tmp_path / "bad", tmp_path / "out")
    assert code == 0
    assert "config.json is not there: the file is missing" in out
    _, result = run_json("salvage", tmp_path / "bad", tmp_path / "json")
    assert result["files_lost"] == {"config.json": "the file is missing"}
    assert not result["is_partial"]


def test_salvage_and_inspect_tell_whose_is_missing(run, run_json, damaged_ranks, tmp_path):
    code, result = run_json("salvage", damaged_ranks, tmp_path / "json")
    assert (code, result["tensors"], result["ranks_lost"]) == (0, 3, [0])
    missing = {(row["name"], row["rank"]) for row in result["missing"]}
    assert missing >= {("model.rows", None), ("state of rank 0", 0), ("own", 2)}
    for command in (("salvage", damaged_ranks, tmp_path / "out"), ("inspect", tmp_path / "out")):
        code, out, _ = run(*command)
        assert code == 0
        rows = [line.split() for line in out.splitlines() if "float32" in line and "rank 2" in line]
        assert [row[0] for row in rows] == ["own", "tied"]
        assert all(len(line) <= 80 for line in out.splitlines()[1:])
    assert (
        "structure and plain values of rank 0 are lost"
        in run("salvage", damaged_ranks, tmp_path / "more")[1]
    )


def test_salvage_saves_what_is_intact(run, run_json, damaged, tmp_path):
    code, result = run_json("salvage", damaged, tmp_path / "out")
    assert (code, result["tensors"], result["is_partial"]) == (0, 1, True)
    assert [row["name"] for row in result["missing"]] == ["b"]
    assert result["source_id"] == penstock.inspect(damaged).id
    assert penstock.load(tmp_path / "out", allow_partial=True).keys() == {"a", "lr"}
    _, inspected = run_json("inspect", tmp_path / "out")
    assert (inspected["partial"], inspected["missing"][0]["name"]) == (True, "b")
    code, out, _ = run("salvage", damaged, tmp_path / "again")
    assert code == 0
    said = " ".join(out.split())
    assert "tensors 1, 1.2 kB" in said
    assert "again, partial" in said
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line)
    out = run("inspect", tmp_path / "out")[1]
    assert "salvaged from" in out
    assert all(len(line) <= 80 for line in out.splitlines() if str(tmp_path) not in line)
    assert "good, partial" in run("verify", tmp_path / "out")[1]


def test_salvage_takes_nothing_unverified_unasked(run, damaged, tmp_path):
    next(damaged.glob("part-*")).write_text("gone")
    code, out, err = run("salvage", damaged, tmp_path / "out")
    assert (code, out) == (1, "")
    assert "--unverified" in err
    code, out, _ = run("verify", damaged, "--explain")
    assert code == 1
    assert "--unverified" in out
    code, out, _ = run("salvage", damaged, tmp_path / "out", "--unverified")
    assert code == 0
    assert "nothing proves" in out


# ---- scrub, sweep


def test_scrub_reads_what_was_not_read_and_exits_with_1_on_damage(run, run_json, store):
    code, result = run_json("scrub", store.root, "--rate", "200MB")
    states = {row["step"]: row["state"] for row in result["steps"]}
    assert (code, result["ok"]) == (1, False)
    assert states == {10: "verified", 20: "verified", 30: "damaged", 40: "skipped"}
    code, out, _ = run("scrub", store.root)
    assert code == 1
    assert "read back" in out
    assert all(len(line) <= 80 for line in out.splitlines() if "--explain" not in line)
    assert run_json("scrub", store.root)[1]["bytes_checked"] == 0
    assert run_json("scrub", store.root, "--max-age", "0")[1]["bytes_checked"] > 0
    store.delete(30)
    assert run("scrub", store.root)[0] == 0


@pytest.mark.parametrize(
    ("text", "number"),
    [("200MB", 200_000_000), ("1.5 GiB", 3 << 29), ("4096", 4096), ("10kB/s", 10_000)],
)
def test_rates_have_units(text, number):
    assert units.RATE.convert(text, None, None) == number


@pytest.mark.parametrize(("text", "number"), [("7d", 604_800), ("12h", 43_200), ("90", 90)])
def test_ages_have_units(text, number):
    assert units.AGE.convert(text, None, None) == number


@pytest.mark.parametrize(
    "arguments", [["--rate", "0"], ["--rate", "5 parsecs"], ["--max-age", "-1d"]]
)
def test_a_rate_or_an_age_that_is_none_exits_with_2(run, store, arguments):
    assert run("scrub", store.root, *arguments)[0] == 2


def test_sweep_tells_first_and_then_removes(run, run_json, store):
    expected = [store.path(40)]
    code, told = run_json("sweep", store.root, "--dry-run")
    assert (code, told["dry_run"]) == (0, True)
    assert [row["path"] for row in told["swept"]] == expected
    assert Path(store.path(40)).exists()
    assert "would free" in run("sweep", store.root, "--dry-run")[1]
    _, done = run_json("sweep", store.root)
    assert (done["swept"], done["bytes"]) == (told["swept"], told["bytes"])
    assert not Path(store.path(40)).exists()
    assert "nothing to sweep" in " ".join(run("sweep", store.root)[1].split())


def test_ls_shows_what_is_protected_and_what_was_read_back(run, run_json, store):
    store.protect(10)
    store.load(20)
    info = penstock.inspect(store.path(10)).tensors[0]
    flip_bit(Path(store.path(10), info.file), info.begin)
    store.verify(10)
    rows = run_json("ls", store.root)[1]["steps"]
    assert [row["protected"] for row in rows] == [True, False, False, False]
    assert [row["read_back"] for row in rows] == ["damaged", "verified", None, None]
    assert rows[1]["read_at_seconds"] > 0
    out = run("ls", store.root)[1]
    assert "protected, found" in out
    assert "newest, verified" in out
    assert all(len(line) <= 80 for line in out.splitlines())


@pytest.mark.parametrize("command", ["scrub", "sweep"])
def test_a_command_for_stores_points_elsewhere_for_a_checkpoint(run, store, command):
    code, _, err = run(command, store.path(10))
    assert code == 1
    assert "not a store" in err


def test_every_key_of_the_json_of_repair_is_in_the_help(run, run_json, store, damaged, tmp_path):
    for command, *arguments in (
        ("verify", damaged, "--explain"),
        ("salvage", damaged, tmp_path / "out"),
        ("scrub", store.root),
        ("sweep", store.root, "--dry-run"),
    ):
        help_text = run(command, "--help")[1]
        assert all(len(line) <= 80 for line in help_text.splitlines())
        for key in keys_of(run_json(command, *arguments)[1], set()):
            assert re.search(rf"\b{key}\b", help_text), (command, key)


# ---- diff

BASE = {
    "w": torch.arange(12.0).reshape(3, 4),
    "half": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16),
    "count": torch.arange(4),
    "array": np.array([1 + 1j, 2]),
    "blob": b"x" * 5000,
    "lr": 0.1,
    "nan": float("nan"),
    "layers": [torch.zeros(2), torch.zeros(3)],
    "name[0]*": torch.zeros(1),
}


def saved(path, **changes):
    state = {**BASE, **changes}
    penstock.save(path, {key: value for key, value in state.items() if value is not ...})
    return path


def test_diff_of_equal_checkpoints_exits_with_0(run, run_json, tmp_path):
    a = saved(tmp_path / "a")
    # Another order: the same tensors are at other offsets of the file.
    penstock.save(tmp_path / "b", dict(reversed(BASE.items())))
    code, result = run_json("diff", a, tmp_path / "b")
    assert (code, result["same"]) == (0, True)
    assert result["tensors_compared"] == 8
    assert result["bytes_compared"] == penstock.inspect(a).tensor_bytes
    code, out, _ = run("diff", a, tmp_path / "b")
    assert code == 0
    assert "same" in out


def test_diff_counts_elements_that_differ_in_any_bit(run, run_json, tmp_path):
    w = BASE["w"].clone()
    w[0, 0], w[2, 3] = -0.0, 14.5
    half = torch.tensor([float("inf"), float("nan")], dtype=torch.bfloat16)
    changes = {
        "w": w,
        "half": half,
        "count": BASE["count"].flip(0),
        "array": BASE["array"] + 3j,
        "blob": b"x" * 4999 + b"y",
    }
    paths = saved(tmp_path / "a"), saved(tmp_path / "b", **changes)
    code, result = run_json("diff", *paths)
    assert (code, result["same"]) == (1, False)
    found = {
        row["name"]: (row["elements"], row["differing"], row["max_abs_difference"])
        for row in result["tensors"]
    }
    assert found == {
        "w": (12, 2, 3.5),
        "half": (2, 1, None),
        "count": (4, 4, None),
        "array": (2, 2, 3.0),
        "blob": (5000, 1, None),
    }
    code, out, _ = run("diff", *paths)
    assert code == 1
    assert all(len(line) <= 80 for line in out.splitlines())


def test_diff_tells_names_types_ties_and_plain_leaves_apart(run, run_json, tmp_path):
    w = BASE["w"]
    a = saved(tmp_path / "a", tied=w, gone=torch.zeros(1), gone_too=1, half=BASE["half"])
    b = saved(
        tmp_path / "b",
        tied=w.clone(),
        new=torch.zeros(1),
        new_too=1,
        half=BASE["half"].float(),
        array=torch.tensor([1 + 1j, 2], dtype=torch.complex128),
        lr=1,
        count=4,
    )
    code, result = run_json("diff", a, b)
    assert code == 1
    assert result["only_in_a"] == ["gone", "gone_too"]
    assert result["only_in_b"] == ["new", "new_too"]
    changed = {row["name"]: (row["a"]["dtype"], row["b"]["dtype"]) for row in result["changed"]}
    assert changed == {
        "half": ("bfloat16", "float32"),
        "count": ("int64", "plain leaf"),
        "array": ("complex128 (array)", "complex128"),
    }
    assert result["ties"] == [
        {"name": "tied", "a": ["w"], "b": []},
        {"name": "w", "a": ["tied"], "b": []},
    ]
    assert result["values"] == [{"name": "lr", "a": "0.1", "b": "1"}]
    assert result["tensors"] == []
    _, out, _ = run("diff", a, b)
    assert "plain leaf" in out


def test_which_of_tied_names_stores_the_tensor_is_no_difference(run_json, tmp_path):
    w = torch.ones(3)
    penstock.save(tmp_path / "a", {"x": w, "y": w})
    penstock.save(tmp_path / "b", {"y": w, "x": w})
    assert run_json("diff", tmp_path / "a", tmp_path / "b")[0] == 0


def test_diff_finds_a_difference_beyond_the_first_chunk(run_json, tmp_path):
    large = torch.zeros(5 << 20)
    penstock.save(tmp_path / "a", {"large": large})
    large[-1] = 2.0
    penstock.save(tmp_path / "b", {"large": large})
    _, result = run_json("diff", tmp_path / "a", tmp_path / "b")
    row = {"name": "large", "elements": 5 << 20, "differing": 1, "max_abs_difference": 2.0}
    assert result["tensors"] == [row]


def test_diff_of_damaged_data_is_an_error_and_no_difference(run, tmp_path):
    a, b = saved(tmp_path / "a"), saved(tmp_path / "b")
    info = penstock.inspect(b).tensors[0]
    flip_bit(b / info.file, info.begin)
    code, out, err = run("diff", a, b, "--json")
    assert (code, out) == (1, "")
    assert info.file in err


def test_what_a_name_holds_does_not_reach_the_terminal(run, tmp_path):
    """A checkpoint may come from anywhere: its names must not contain terminal control codes."""
    penstock.save(tmp_path / "ckpt", {"a\nb\x1b[31m\x07\u202e": np.ones(1)})
    code, out, _ = run("inspect", tmp_path / "ckpt")
    assert code == 0
    assert not {"\x1b", "\x07", "\u202e"} & set(out)
    assert r"a\nb\x1b\[31m" in out.replace("\n", "")


@pytest.mark.parametrize("command", ["ls", "inspect", "verify"])
def test_an_empty_path_is_not_the_current_directory(run, tmp_path, monkeypatch, command):
    penstock.save(tmp_path / "ckpt", {"a": 1})
    monkeypatch.chdir(tmp_path / "ckpt")
    assert run(command, "")[0] == 2


# ---- Paths that are no directory


TAKES_A_PATH = ["ls", "inspect", "verify", "verify --explain", "diff", "scrub", "sweep", "salvage"]


def on(command, path, tmp_path):
    """Returns a command line about a path."""
    further = {"diff": [path], "salvage": [tmp_path / "out"], "quarantine": [1]}
    return [*command.split(), path, *further.get(command, [])]


@pytest.mark.parametrize("command", [*TAKES_A_PATH, "quarantine"])
def test_what_is_no_directory_is_called_what_it_is(run, store, tmp_path, command):
    (tmp_path / "model.pt").write_bytes(b"x")
    (tmp_path / "notes.txt").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    os.symlink("nowhere", tmp_path / "link")
    os.symlink("itself", tmp_path / "itself")
    manifest = Path(store.path(10), "manifest.json")
    for path, what in [
        (tmp_path / "model.pt", "is called like files of torch.save and does not begin like one"),
        (tmp_path / "notes.txt", "is a file, and a checkpoint is a directory"),
        (tmp_path / "pipe", "this is a pipe,"),
        (tmp_path / "link", "this is a link that leads nowhere,"),
        (tmp_path / "itself", "Too many levels of symbolic links"),
        (manifest, f"pass the directory that it is in, '{store.path(10)}'"),
        (tmp_path / "none", "there is no such directory"),
    ]:
        code, out, err = run(*on(command, path, tmp_path))
        assert (code, out) == (1, "")
        assert f"{path}" in err
        assert what in err


@pytest.mark.parametrize("command", [*TAKES_A_PATH, "quarantine"])
def test_what_may_not_be_looked_into_is_said_to_be_so(run, tmp_path, command, monkeypatch):
    told = f"cannot list {tmp_path}/locked: Permission denied"

    def refused(path):
        raise StorageError(told, path=path, errno=errno.EACCES)

    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(paths._native, "list_names", refused)
    code, out, err = run(*on(command, tmp_path / "locked", tmp_path))
    assert (code, out, err) == (1, "", f"error: {told}\n")


# ---- quarantine


def test_a_damaged_step_is_set_aside(run, run_json, store):
    code, result = run_json("quarantine", store.root, 30)
    assert code == 0
    path = f"{store.root}/damaged-0000000030-0001"
    assert result == {"root": store.root, "step": 30, "path": path}
    assert store.quarantined() == [(30, path)]
    assert [row["step"] for row in run_json("ls", store.root)[1]["quarantined"]] == [30]
    shard_of(store.path(20)).unlink()
    code, out, err = run("quarantine", store.root, 20)
    assert (code, err) == (0, "")
    assert "".join(out.split()) == f"step20isnow{store.root}/damaged-0000000020-0002"


def test_what_is_not_known_to_be_damaged_is_not_set_aside(run, store):
    code, out, err = run("quarantine", store.root, 10)
    assert (code, out) == (1, "")
    assert "not known to be damaged" in err
    assert store.quarantined() == []
    for step, code in [(99, 1), (-1, 2), ("x", 2)]:
        assert run("quarantine", store.root, "--", step)[0] == code
