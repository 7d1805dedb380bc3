"""`penstock bench gather`: rows that are checked, patterns of others, what comes of rounds."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from penstock import _native, features
from penstock.cli import cli
from penstock.common.machine.limits import LimitError
from penstock_bench.harness import fio
from penstock_bench.harness.running import run_module
from penstock_bench.peers.gather import (
    CALLS,
    EXACT,
    FORESEEING,
    GATHERERS,
    OURS,
    RESIDENT,
    SCAN,
    UNCHECKED,
    Entry,
    policies,
)
from penstock_bench.peers.gather.base import KEY, Plain, Setting
from penstock_bench.peers.gather.calls import Rules, planned
from penstock_bench.results.results import Measurement, Results
from penstock_bench.suites.gather import gathered, gathering, random_reads
from penstock_bench.suites.gather.cases import (
    ALL,
    BATCHES,
    BELADY,
    CACHED,
    CASES,
    DENSE,
    FIO,
    FIO_POOL,
    HITS,
    POLICIES,
    REFERENCE,
    SIEVE,
    Plan,
)
from penstock_bench.suites.gather.gather import Gather
from penstock_bench.suites.gather.random_reads import Region
from penstock_bench.workloads import row_content
from penstock_bench.workloads.traces import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROWS, BATCH_ROWS = 4096, 64
EMULATED = ("graphbolt", "ginex", "gids")


def table_at(place: Path, row_bytes: int) -> Setting:
    chunks = row_content.chunks(ROWS, row_bytes)
    features.write(place / "table", chunks, key=KEY, shape=(ROWS, row_bytes // 8), dtype=np.int64)
    with features.open(place / "table") as opened:
        (segment,) = opened.source.segments
    return Setting(
        table=str(place / "table"),
        file=segment.path,
        offset=segment.offset,
        rows=ROWS,
        row_bytes=row_bytes,
        place=str(place),
        cache_bytes=0,
        depth=4,
    )


@pytest.fixture(scope="module", params=[512, 4096])
def setting(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return table_at(tmp_path_factory.mktemp(f"rows-{request.param}"), request.param)


@pytest.fixture(scope="module")
def ids() -> Any:
    trace = Trace(law="degree", rows=ROWS, batches=12, batch_rows=BATCH_ROWS, recurring=0.1, seed=3)
    return trace.ids()


@pytest.fixture
def job_of(tmp_path: Path, ids: Any) -> Callable[..., dict[str, Any]]:
    """A job."""

    def made(by: str, setting: Setting, **changed: Any) -> dict[str, Any]:
        place = tmp_path / "place"
        place.mkdir(exist_ok=True)
        np.save(tmp_path / "trace.npy", ids)
        cache_bytes = changed.pop("cache_bytes", 0)
        job = {
            "by": by,
            "setting": asdict(setting) | {"place": str(place), "cache_bytes": cache_bytes},
            "trace": str(tmp_path / "trace.npy"),
            "is_preparing": False,
            "is_warm": False,
            "seconds_max": None,
            "group": None,
        }
        return job | changed

    return made


@pytest.fixture
def done(job_of: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Does a job in this process."""
    return lambda *arguments, **changed: gathering.done(job_of(*arguments, **changed))


def test_a_trace_asks_for_each_row_once_in_a_batch() -> None:
    uniform = Trace(law="uniform", rows=1000, batches=10, batch_rows=100).ids()
    assert np.array_equal(np.sort(uniform, axis=None), np.arange(1000))
    for law in ("degree", "zipf"):
        asked = Trace(
            law=law, rows=5000, batches=30, batch_rows=200, recurring=0.2, is_permuted=False
        )
        found = asked.ids()
        assert found.shape == (30, 200)
        assert all(len(np.unique(batch)) == 200 for batch in found)
        assert found.min() >= 0
        assert found.max() < 5000
        # Likely rows lie in front, where they were not put anywhere.
        assert np.median(found) < 2000
        # A fifth are seeds, of which there are 50.
        seeds, counts = np.unique(found[:, :40], return_counts=True)
        assert len(seeds) <= 2 * 50
        assert counts.sum() == 30 * 40
        assert np.array_equal(found, asked.ids())
    with pytest.raises(ValueError, match="take a table of 1,100 rows; this one has 1,000"):
        Trace(law="uniform", rows=1000, batches=11, batch_rows=100).ids()
    with pytest.raises(ValueError, match="take a table of 4,000 rows"):
        Trace(law="zipf", rows=1000, batches=1, batch_rows=1000).check()


def test_policies_of_others_miss_as_ours_do(ids: Any) -> None:
    keys = np.ascontiguousarray(np.tile(ids.reshape(-1), 3), np.uint64)
    array = keys.ctypes.data, (len(keys),), None, 8, keys
    for slots in (1, 7, 100, 600):

        def ours(window: int, slots: int = slots) -> int:
            return len(keys) - _native.RowIndex(slots, "sieve").replay(array, BATCH_ROWS, window)

        assert policies.misses(policies.Sieve(slots), keys.tolist()) == ours(0)
        belady = policies.misses(policies.Belady(slots, keys), keys.tolist())
        assert belady == ours(len(keys))
        # A policy that knows a part at a time, or a window, has fewer hits.
        parted = policies.Belady(slots, keys, 4 * BATCH_ROWS)
        assert policies.misses(parted, keys.tolist()) >= belady
        ahead = policies.RandomAhead(slots, keys, window=2 * BATCH_ROWS)
        assert policies.misses(ahead, keys.tolist()) >= belady


def batches_of(*batches: Sequence[int]) -> list[Any]:
    return [np.array(ids, np.int64) for ids in batches]


def test_what_is_being_written_is_read_again() -> None:
    rules = Rules(slots=8, line_rows=1, rereads_written=True)
    calls = planned(batches_of([1, 2], [1, 3], [1, 3]), policies.Sieve(8), rules)
    assert [call.lines.tolist() for call in calls] == [[1, 2], [3, 1], [3]]


def test_a_call_takes_batches_until_it_reads_enough() -> None:
    rules = Rules(slots=8, line_rows=4, keeps_lines=True, lines_min=3)
    batches = batches_of([1, 2, 9], [8, 3], [12, 0], [13])
    calls = list(planned(batches, policies.Sieve(8), rules))
    assert [len(call.where) for call in calls] == [3, 1]
    assert [call.lines.tolist() for call in calls] == [[0, 2, 3], []]
    assert [call.hits for call in calls] == [3, 1]
    assert rules.keys(batches).tolist() == [0, 2, 2, 0, 3, 0, 3]


def test_everybody_brings_the_rows_that_were_asked_for(
    setting: Setting, done: Callable[..., dict[str, Any]], ids: Any
) -> None:
    cache_bytes = 200 * (setting.row_bytes + 64)
    for by, entry in GATHERERS.items():
        if entry.missing is not None or entry.has_files:
            continue
        found = done(by, setting, cache_bytes=cache_bytes)
        assert found["rows"] == ids.size, by
        assert found["seconds"] > 0
        if "read_rows" in found and by not in EMULATED:
            assert found["hits"] + found["read_rows"] == ids.size
            assert 0 < found["requests"] <= found["read_rows"]


@pytest.mark.parametrize("by", [by for by, entry in GATHERERS.items() if entry.has_files])
def test_others_bring_them_from_files_of_their_own(
    by: str, setting: Setting, job_of: Callable[..., dict[str, Any]], ids: Any
) -> None:
    if (missing := GATHERERS[by].missing) is not None:
        pytest.skip(missing)
    # Their libraries leave threads behind, and mind forks.
    jobs = job_of(by, setting, is_preparing=True), job_of(by, setting)
    made, found = (
        run_module("penstock_bench.suites.gather.gathering", job, timeout_seconds=120)
        for job in jobs
    )
    assert made == {}
    assert found.get("rows") == ids.size, found


@pytest.mark.parametrize("by", EMULATED)
def test_others_are_emulated_with_a_request_for_each_line(
    by: str, setting: Setting, done: Callable[..., dict[str, Any]], ids: Any
) -> None:
    whole = done(by, setting, cache_bytes=1 << 24)
    few = done(by, setting, cache_bytes=1 << 15)
    for found in (whole, few):
        assert found["asked_bytes"] == found["requests"] * 4096
        if setting.row_bytes == 4096:
            assert found["hits"] + found["read_rows"] == ids.size
        # A line that one call has twice is read once.
        assert found["requests"] <= found["read_rows"]
    lines = np.unique(ids * setting.row_bytes // 4096)
    if by == "gids":
        assert whole["requests"] == len(lines)
    else:
        assert whole["requests"] >= len(lines)
    assert few["hits"] < whole["hits"]
    assert done(by, setting)["hits"] == 0


def test_rows_that_make_no_lines_are_refused(
    tmp_path: Path, done: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(ValueError, match="ginex is emulated with rows of 4096 bytes"):
        done("ginex", table_at(tmp_path, 1536), cache_bytes=1 << 20)


class Liar(Plain):
    """Another one's row, or a row with another one's word in it."""

    batch, row, word = 0, 0, 0

    def open(self, setting: Setting, batches: Any) -> None:
        self._row_bytes = setting.row_bytes
        self._at = -1

    def one(self, ids: Any) -> Any:
        self._at += 1
        rows = row_content.rows_of(ids, self._row_bytes)
        if self._at == self.batch:
            rows[self.row, self.word] ^= 1
        return rows


@pytest.mark.parametrize(("batch", "row", "word"), [(0, 5, 0), (3, 63, -1), (11, 0, 7)])
def test_a_wrong_row_is_noticed(
    batch: int,
    row: int,
    word: int,
    setting: Setting,
    done: Callable[..., dict[str, Any]],
    ids: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    liar = type("Another", (Liar,), {"batch": batch, "row": row, "word": word})
    monkeypatch.setattr(Entry, "make", lambda _: liar())
    words = f"batch {batch}: row {row} of a batch is not that of id {ids[batch, row]}"
    with pytest.raises(ValueError, match=words):
        done("memmap", setting)


def test_too_few_rows_are_noticed(
    setting: Setting, done: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy(Liar):
        batch = -1

        def gather(self, batches: Any) -> Any:
            return super().gather(batches[:-1])

    monkeypatch.setattr(Entry, "make", lambda _: Lazy())
    with pytest.raises(ValueError, match="11 of 12 batches came"):
        done("memmap", setting)
    # Who waits for one row after the other need not have them all.
    assert done("memmap", setting, seconds_max=0.0)["rows"] == BATCH_ROWS


def test_a_warm_table_is_read_before(
    setting: Setting, done: Callable[..., dict[str, Any]], ids: Any
) -> None:
    found = done(OURS, setting, cache_bytes=1 << 26, is_warm=True)
    assert (found["hits"], found["requests"]) == (ids.size, 0)


@pytest.mark.parametrize("setting", [512], indirect=True)
def test_fio_reads_the_same_rows(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fio.is_there():
        pytest.skip("fio is not installed")
    monkeypatch.setattr(random_reads, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(random_reads, "_JOBS", (1,))
    monkeypatch.setattr(random_reads, "_DEPTHS", (2, 4))
    nbytes = setting.rows * setting.row_bytes
    region = Region(Path(setting.file), setting.offset, nbytes, setting.row_bytes)
    best = random_reads.best(region)
    assert best.in_flight in (2, 4)
    found = random_reads.measured(region, best, 1024)
    assert found.rows == found.requests == 1024
    assert found.nbytes == 1024 * setting.row_bytes
    whole = random_reads.measured(region, random_reads.SCAN, None)
    assert whole.nbytes == nbytes


def canned(rounds: int = 2) -> Results:
    """Rounds in which figures are such that ratios are seen."""
    made = Results(
        kind="gather",
        machine={},
        disk={},
        settings={
            "rows": 1000, "row_bytes": 4096, "batch_rows": 10, "limit_bytes": 1, "cache_bytes": 1,
        },
    )  # fmt: skip

    def add(case: str, by: str, index: int, seconds: float, **fields: Any) -> None:
        one = Measurement(
            case=case, by=by, round_index=index, seconds=seconds, nbytes=4096 * 1000, rows=1000,
            **fields,
        )  # fmt: skip
        made.measurements.append(one)

    for index in range(rounds):
        add(BATCHES, FIO, index, 0.9)
        add(BATCHES, OURS, index, 1.0, read_bytes=4096 * 1010, cpu_seconds=0.1)
        add(BATCHES, FIO, index, 0.9)
        add(BATCHES, UNCHECKED, index, 0.98)
        add(BATCHES, FIO_POOL, index, 1.0, cpu_seconds=0.4)
        add(BATCHES, "memmap", index, 7.0)
        add(DENSE, OURS, index, 1.0, requests=300)
        add(DENSE, SCAN, index, 1.25)
        add(DENSE, EXACT, index, 2.0)
        for by, seconds, hits in (
            (OURS, 1.0, 500), ("graphbolt", 2.0, 400), ("ginex", 1.25, 600), (FORESEEING, 1.0, 590),
        ):  # fmt: skip
            add(CACHED, by, index, seconds, hits=hits)
        add(HITS, OURS, index, 1.0, hits=1000)
        add(HITS, CALLS, index, 1.125)
        add(HITS, RESIDENT, index, 0.9)
    for part, hits in ((0.1, 300), (0.2, 500)):
        case = f"{POLICIES}, {part:.0%}"
        made.cases[case] = {"pattern": POLICIES, "part": part, "slots": 10}
        for by in (ALL, BELADY, SIEVE, REFERENCE):
            one = Measurement(case=case, by=by, round_index=0, seconds=1.0, rows=1000, hits=hits)
            made.measurements.append(one)
    return made


def test_what_comes_of_rounds() -> None:
    results = canned()
    found = {(one.case, one.words): one.found.median for one in gathered.comparisons(results)}
    assert found == pytest.approx(
        {
            (BATCHES, "rows a second, by fio's"): 0.9,
            (BATCHES, "bytes read by bytes of rows, penstock"): 1.01,
            (BATCHES, "rows a second, by those not checked"): 0.98,
            (BATCHES, "CPU seconds a row, by fio-pread"): 0.25,
            (DENSE, "requests a row"): 0.3,
            (DENSE, "time, by the better of a scan and rows alone"): 0.8,
            (CACHED, "time, penstock by graphbolt"): 0.5,
            (CACHED, "time, penstock by ginex"): 0.8,
            (CACHED, "time, penstock-1000 by graphbolt"): 0.5,
            (CACHED, "time, penstock-1000 by ginex"): 0.8,
            (CACHED, f"rows missed, {FORESEEING} by ginex"): 1.025,
            (HITS, "rows a second, penstock by in-memory"): 0.9,
            (HITS, "rows a second, penstock-gather by in-memory"): 0.8,
            (POLICIES, f"misses, {ALL} by {BELADY}"): 1.0,
            (POLICIES, f"misses, {SIEVE} by {REFERENCE}"): 1.0,
        }
    )
    times = gathered.times_of(results, BATCHES, "memmap")
    assert times is not None
    assert times.median == pytest.approx(7.0)
    assert gathered.miss_curves(results)[BELADY] == pytest.approx({0.1: 0.7, 0.2: 0.5})
    assert [gathered.figure(value) for value in (0.0304, 1, 99.94, 99.96, 12345.6)] == [
        "0.0304", "1.00", "99.9", "100", "12,346",
    ]  # fmt: skip


def test_a_page_shows_rates_ratios_and_curves(tmp_path: Path) -> None:
    canned().write(tmp_path / "out.json")
    page = tmp_path / "page.html"
    told = CliRunner().invoke(cli, ["bench", "report", str(tmp_path / "out.json"), str(page)])
    assert told.exit_code == 0, told.output
    html = page.read_text()
    # Charts first, then tables.
    for title in ("Rows", "Rows a second", "Hits", "Ratios", "Misses", "Rates"):
        assert f"<h2>{title}</h2>" in html
    assert html.index("<h2>Rows a second</h2>") < html.index("<h2>Ratios</h2>")
    # Policies were counted; who was measured is told in front.
    lead = html[: html.index("<nav")]
    assert "memmap" in lead
    assert BELADY not in lead
    assert 'aria-label="Hits by what is kept, in per cent"' in html


def run(place: Path, arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli, f"bench gather {place} {arguments}")


def test_a_warm_case_asks_for_rows_of_the_table(tmp_path: Path) -> None:
    plan = Plan(
        work=tmp_path, rows=ROWS, row_bytes=512, cases=[HITS], names=None, rounds=1, batches=3,
        batch_rows=1024, cache_bytes=1, limit_bytes=1, law="degree", recurring=0.1,
        seconds_max=1.0, timeout_seconds=1.0,
    )  # fmt: skip
    ids = CASES[HITS].ids(plan)
    assert np.array_equal(np.unique(ids), np.arange(ROWS))
    assert CASES[HITS].cache_bytes(plan) >= ROWS * (512 + 64)


SMALL = "--rows 4096 --row-bytes 1024 --batches 4 --batch-rows 64 --rounds 1 --seconds 0.1"


def test_a_whole_run_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fio, "is_there", lambda: False)
    place, output = tmp_path / "place", tmp_path / "out.json"
    place.mkdir()
    told = run(
        place,
        f"{SMALL} --case batches,cached,policies --by penstock,memmap,graphbolt --output {output}",
    )
    assert told.exit_code == 0, told.output
    assert list(place.iterdir()) == []
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert fio.MISSING in " ".join(told.output.split())
    read = Results.read(output)
    assert read.kind == "gather"
    assert {one.by for one in read.measurements if one.error} == {FIO}
    (ours,), (theirs,) = read.of(CACHED, OURS), read.of(CACHED, "graphbolt")
    assert ours.rows == ours.checked == theirs.rows == 4 * 4 * 64
    assert ours.nbytes == ours.rows * 1024
    assert ours.read_bytes is not None
    # Either storage has counted what it gave, or something says why it is not direct.
    assert ours.is_direct or ours.notes
    assert 0 < (theirs.hits or 0) < theirs.rows
    curve = gathered.miss_curves(read)
    assert list(curve[SIEVE].values()) == list(curve[REFERENCE].values())
    assert read.of(BATCHES, "graphbolt")


def test_who_fails_is_told_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def once(_: Gather, job: dict[str, Any]) -> dict[str, Any]:
        asked.append(job["by"])
        if job["by"] == "memmap":
            return {"error": "ended with 1: batch 0: row 3 of a batch is not that of id 7"}
        return {
            "seconds": 1.0, "open_seconds": 0.1, "cpu_seconds": 0.1, "rows": 256,
            "read_bytes": 100, "asked_bytes": 1000, "memory_peak_bytes": 1, "is_direct": True,
        }  # fmt: skip

    monkeypatch.setattr(Gather, "_run", once)
    monkeypatch.setattr(fio, "is_there", lambda: False)
    told = run(tmp_path, f"{SMALL} --rounds 2 --case batches --by penstock,memmap --json")
    # Others may fail; ours has not.
    assert told.exit_code == 0, told.output
    assert sorted(asked) == ["memmap", OURS, OURS]
    measured = json.loads(told.stdout)["measurements"]
    (theirs,) = (one for one in measured if one["by"] == "memmap")
    assert "is not that of id 7" in theirs["error"]
    (ours, _) = (one for one in measured if one["by"] == OURS)
    assert not ours["is_direct"]
    assert any("asked for 1000, and storage gave 100 bytes" in note for note in ours["notes"])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(Gather, "_run", lambda *_: {"error": "no memory"})
    command = f"bench gather {tmp_path} {SMALL} --case batches --by penstock".split()
    assert cli.main(command, standalone_mode=False) == 1


def test_where_memory_cannot_be_limited_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise LimitError("no groups here")

    monkeypatch.setattr("penstock.common.machine.limits._made", refuse)
    monkeypatch.setattr(fio, "is_there", lambda: False)
    told = run(tmp_path, f"{SMALL} --case cached --by penstock --json")
    assert told.exit_code == 0, told.output
    (ours,) = (one for one in json.loads(told.stdout)["measurements"] if one["by"] == OURS)
    assert "memory is not limited: no groups here" in ours["notes"]
    assert ours["checked"] == ours["rows"]


def test_command_lines_that_make_no_sense(tmp_path: Path) -> None:
    for arguments, message in (
        ("--by nobody", "there is no 'nobody'"),
        ("--case none", "there is no 'none'"),
        ("--row-bytes 100", "a multiple of 8"),
        ("--rows 2048 --batch-rows 1024", "take a table of"),
        ("--rows 4000000000", "choose fewer --rows"),
    ):
        told = run(tmp_path, arguments)
        assert told.exit_code == 2, told.output
        assert message in " ".join(told.output.split())
    assert list(tmp_path.iterdir()) == []


def test_who_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry(module="lmdb", attribute="Lmdb", note="", library="no_such", package="no-such")
    monkeypatch.setitem(GATHERERS, "lmdb", entry)
    monkeypatch.setattr(Gather, "run", lambda _: None)
    told = run(tmp_path, f"{SMALL} --case batches --by lmdb")
    assert "without lmdb: no-such is not installed: pip install no-such" in told.output
