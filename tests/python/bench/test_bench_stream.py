"""`penstock bench stream`: its processes, its figures, and that it leaves nothing."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner

import forks
from penstock.cli import cli
from penstock.common.machine.limits import LimitError, limited
from penstock_bench.harness.running import BenchError
from penstock_bench.peers.stream import GENERATORS, OURS, RESIDENT, Setting
from penstock_bench.results.results import Measurement, Results
from penstock_bench.suites.stream import generating, tokens
from penstock_bench.suites.stream.stream import SIZES, Plan, Stream, weight_bytes

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

MIB = 1 << 20


@pytest.fixture(scope="module")
def can_limit() -> None:
    """Skips where no control group can be made."""
    try:
        with limited(64 * MIB):
            pass
    except LimitError as error:
        pytest.skip(f"memory cannot be limited here: {error}")


def saved(directory: Path) -> Path:
    config = transformers.LlamaConfig(
        **SIZES["toy"], dtype=torch.bfloat16, eos_token_id=None, pad_token_id=0
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_a_process_tells_what_its_model_did(tmp_path: Path) -> None:
    model = saved(tmp_path / "model")
    job = {"prompt": [1, 2, 3], "tokens": 4, "lookup": 0}
    found = {}
    for name in (RESIDENT, OURS):
        generator = GENERATORS[name].make()
        opened = generator.open(Setting(str(model), str(tmp_path), 400_000))
        found[name] = generating._generate(opened, job) | generator.report()
    ours, resident = found[OURS], found[RESIDENT]
    assert ours["logits"] == resident["logits"]
    assert len(ours["logits"]) == 4
    assert len(ours["pass_seconds"]) == 3
    assert ours["pass_tokens"] == [1, 1, 1]
    assert 0 < ours["first_token_seconds"] <= ours["seconds"]
    assert ours["pass_bytes"] > 0
    assert ours["memory_peak_bytes"] > 50 * MIB


def test_tokens_that_are_guessed_come_several_in_a_pass(tmp_path: Path) -> None:
    whole = transformers.AutoModelForCausalLM.from_pretrained(saved(tmp_path))
    generating._repeat(whole)
    whole.save_pretrained(tmp_path)
    generator = GENERATORS[OURS].make()
    opened = generator.open(Setting(str(tmp_path), str(tmp_path), 400_000))
    found = generating._generate(opened, {"prompt": [21, 22], "tokens": 40, "lookup": 8})
    assert len(found["logits"]) == 40
    assert len(found["pass_seconds"]) == len(found["pass_tokens"]) < 20
    assert max(found["pass_tokens"]) == 9


def test_sizes_are_what_is_made_of_them(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(saved(tmp_path))
    assert weight_bytes("toy") == sum(one.numel() * 2 for one in model.parameters())
    assert 2.3e9 < weight_bytes("1b") < 2.5e9


def results(rounds: int = 3) -> Results:
    """Rounds in which a pass of ours takes 1.25 times what it might."""
    made = Results(kind="stream", machine={}, disk={}, settings={"weight_bytes": 2 * 10**9})
    for index in range(rounds):

        def add(by: str, index: int = index, **fields: Any) -> None:
            one = Measurement(case=tokens.CASE, by=by, round_index=index, requests=8, **fields)
            made.measurements.append(one)

        add(tokens.FIO, nbytes=2 * 10**9, seconds=1.0)
        add(RESIDENT, seconds=1.0, token_seconds=0.1, first_token_seconds=0.2)
        add(OURS, seconds=8.0, token_seconds=0.625, first_token_seconds=1.1, pass_bytes=10**9)
        add("accelerate", seconds=30.0, token_seconds=5.0, first_token_seconds=6.0)
    return made


def test_what_comes_of_rounds() -> None:
    made = results()
    assert tokens.token_rates(made)[OURS] == [1.6] * 3
    # It reads 1 GB of what fio reads at 2 GB/s.
    assert tokens.of_roofline(made) == pytest.approx([0.8] * 3)
    assert tokens.token_roofline(made) == pytest.approx(2.0)
    assert tokens.first_of_pass(made) == pytest.approx([1.1] * 3)
    assert tokens.times_of(made, "accelerate") == pytest.approx([8.0] * 3)
    # A second of 5 is what computing takes.
    for by, cpu_seconds in ((RESIDENT, 1.0), ("accelerate", 5.0)):
        for one in made.of(tokens.CASE, by):
            one.cpu_seconds, one.nbytes = cpu_seconds, 2 * 10**9 * (by != RESIDENT)
    assert tokens.cpu_seconds_per_gb(made, "accelerate") == pytest.approx([2.0] * 3)
    assert tokens.cpu_seconds_per_gb(made, RESIDENT) == []
    # A pass that gives two tokens reads half as much for each.
    for one in made.of(tokens.CASE, OURS):
        one.pass_tokens = 2.0
    assert tokens.of_roofline(made) == pytest.approx([0.4] * 3)
    for one in made.of(tokens.CASE, OURS):
        one.pass_tokens = None
    # Where computing takes longer than reading, that counts.
    for one in made.of(tokens.CASE, RESIDENT):
        one.token_seconds = 0.6
    assert tokens.of_roofline(made) == pytest.approx([0.96] * 3)
    made.measurements = [one for one in made.measurements if one.by != tokens.FIO]
    assert tokens.of_roofline(made) == []
    assert tokens.token_roofline(made) is None


def canned(name: str) -> dict[str, Any]:
    return {
        "open_seconds": 1.0,
        "seconds": 4.0,
        "first_token_seconds": 2.0,
        "pass_seconds": [1.0, 1.0],
        "pass_tokens": [1, 1],
        "cpu_seconds": 1.0,
        "read_bytes": 10,
        "written_bytes": 0,
        "memory_peak_bytes": 500 * MIB,
        "logits": [hashlib.sha256(name.encode()).hexdigest()] * 3 if name == "zero" else ["a"] * 3,
        "pass_bytes": 10**9,
    }


@pytest.mark.parametrize(
    ("later", "seconds"), [({}, 0.5), ({"pass_seconds": [], "pass_tokens": []}, 2 / 8)]
)
def test_a_pass_that_gives_several_tokens_counts_for_each(
    tmp_path: Path, later: dict[str, Any], seconds: float
) -> None:
    """Also where the first pass gives all of them."""
    plan = Plan(
        work=tmp_path, size="toy", names=[OURS], rounds=1, tokens=8, lookup=4, limit_bytes=None,
        timeout_seconds=1.0,
    )  # fmt: skip
    run = Stream(plan, Results(kind="stream", machine={}, disk={}, settings={}), print)
    guessed = {"pass_tokens": [2, 2], "logits": ["a"] * 8}
    run._take(OURS, 0, canned(OURS) | guessed | later)
    (one,) = run.results.measurements
    assert one.token_seconds == seconds


def test_a_model_that_cannot_be_made_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "_child", lambda *_: {"error": "no space left on device"})
    told = CliRunner().invoke(cli, f"bench stream {tmp_path} --model toy --by penstock")
    assert told.exit_code != 0
    assert "making the model toy: no space left on device" in f"{told.output}{told.exception}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("can_limit")
def test_a_run_is_told_as_table_and_page_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of processes are given: they take minutes."""
    asked = []

    def child(self: Stream, job: dict[str, Any]) -> dict[str, Any]:
        asked.append((job.get("by"), job.get("group"), job.get("is_preparing")))
        if "config" in job:
            directory = self.plan.work / job["directory"]
            directory.mkdir()
            (directory / "model.safetensors").write_bytes(bytes(8 * MIB))
            return {}
        if job["by"] == "airllm":
            return {"error": "it does not like this machine"}
        return canned(job["by"])

    monkeypatch.setattr(Stream, "_child", child)
    monkeypatch.setattr(type(GENERATORS[OURS]), "missing", None)
    place = tmp_path / "place"
    place.mkdir()
    page, output = tmp_path / "page.html", tmp_path / "out.json"
    told = CliRunner(env={"COLUMNS": "80"}).invoke(
        cli,
        f"bench stream {place} --model toy --rounds 2 --limit 1GB --report {page} --output {output}"
        " --by resident,penstock,accelerate,airllm,zero",
    )
    assert told.exit_code == 0, told.output
    assert list(place.iterdir()) == []
    assert max(map(len, told.output.splitlines())) <= 80
    assert "airllm: it does not like this machine" in told.output
    read = Results.read(output)
    assert read.kind == "stream"
    ours = read.of(tokens.CASE, OURS)
    assert [one.checked for one in ours] == [3, 3]
    # Memory with a model of nearly nothing is not that of weights.
    assert [one.memory_over_bytes for one in ours] == [0, 0]
    errors = [one for one in read.measurements if one.error]
    assert {one.by for one in errors} <= {"airllm", "fio", OURS, "accelerate", "zero"}
    assert [one.checked for one in read.of(tokens.CASE, "zero")] in ([0, 0], [])
    assert ("accelerate", None, True) in asked
    assert (OURS, None, True) not in asked
    html = page.read_text()
    assert html.index("Tokens a second") < html.index("first token s")
    assert "it does not like this machine" in html


def test_command_lines_that_make_no_sense(tmp_path: Path) -> None:
    for arguments, message in (
        (["--by", "nobody"], "there is no 'nobody'"),
        (["--limit", "much"], "'much' is not a size"),
        (["--model", "9b"], "not one of"),
    ):
        told = CliRunner().invoke(cli, ["bench", "stream", str(tmp_path), *arguments])
        assert told.exit_code == 2
        assert message in told.output
    assert list(tmp_path.iterdir()) == []


GREEDY = """
import sys
open(sys.argv[1], "w").write("0")
held = bytearray(int(sys.argv[2]))
for at in range(0, len(held), 4096):
    held[at] = 1
"""


@pytest.mark.usefixtures("can_limit")
def test_a_group_has_its_memory_and_no_more() -> None:
    with limited(128 * MIB) as limit:

        def child(nbytes: int) -> int:
            command = [sys.executable, "-S", "-c", GREEDY, str(limit.processes), str(nbytes)]
            return subprocess.run(command, capture_output=True, check=False).returncode

        assert child(32 * MIB) == 0
        assert limit.peak_bytes is None or 32 * MIB <= limit.peak_bytes <= 128 * MIB
        assert child(512 * MIB) == -9
    assert not limit.processes.parent.exists()


def test_where_memory_cannot_be_limited_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise LimitError("no groups here")

    monkeypatch.setattr("penstock.common.machine.limits._made", refuse)
    monkeypatch.setattr(Stream, "_child", lambda *_: {})
    told = CliRunner().invoke(cli, f"bench stream {tmp_path} --model toy --by penstock")
    assert isinstance(told.exception, BenchError)
    assert "memory cannot be limited: no groups here" in str(told.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("can_limit")
def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Importing transformers takes each process ten seconds.
    forking = forks.replacing(forks.ModelPopen)
    monkeypatch.setattr("penstock_bench.harness.running.subprocess", forking)
    told = CliRunner().invoke(
        cli,
        f"bench stream {tmp_path} --model toy --by resident,penstock --limit 3GB --rounds 1"
        " --tokens 3 --json",
    )
    assert told.exit_code == 0, told.output
    (ours,) = (one for one in json.loads(told.stdout)["measurements"] if one["by"] == OURS)
    assert ours["error"] is None
    assert ours["checked"] == ours["requests"] == 3
    assert list(tmp_path.iterdir()) == []
