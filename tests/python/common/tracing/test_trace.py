"""`penstock.trace`, PENSTOCK_TRACE and `penstock trace`: real saves and their traces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import penstock
from conftest import run_command
from penstock.common import tracing
from penstock.common.tracing import recorded, summary
from penstock.errors import CheckpointExistsError, StorageError
from threads import on_threads

MIB = 1 << 20


def state(mib=48):
    return {f"w{index}": np.full(MIB, index, np.uint8) for index in range(mib)}


def traced(path, work):
    with penstock.trace(path):
        result = work()
    return recorded.read(path), result


def best_traced(path, work):
    """Returns the best of three traces: waiting for a processor between phases belongs to none."""
    tries = [traced(path, lambda number=number: work(number)) for number in range(3)]
    return max(tries, key=lambda one: summary.calls(one[0])[0].accounted)


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def spans(trace, name):
    return [span for span in trace.spans if span.name == name]


def test_a_save_is_accounted_for(tmp_path):
    trace, report = best_traced(
        tmp_path / "trace.json", lambda number: penstock.save(tmp_path / str(number), state(96))
    )
    (call,) = summary.calls(trace)
    assert (call.name, call.role, call.times) == ("save", "stall", 1)
    # Phases named "hand…" are the time to pass work to a thread and back.
    phases = [name for name in call.phases if not name.startswith("hand")]
    assert phases == ["flatten", "plan", "write", "sync", "describe", "commit", "release"]
    assert call.accounted >= 0.98
    # The trace and the report measure the same time.
    assert call.seconds == pytest.approx(report.seconds, rel=0.05)
    written = sum(one.nbytes for one in trace.requests if one.operation == "write")
    assert report.tensor_bytes <= written <= report.bytes + 4096
    assert not trace.is_cut


def test_the_threads_that_write_are_accounted_for(tmp_path):
    trace, _ = traced(tmp_path / "trace.json", lambda: penstock.save(tmp_path / "ckpt", state()))
    (work,) = [one for one in summary.work(trace) if one.role == "writer"]
    assert {"copy", "digest", "submit"} <= work.parts.keys()
    assert all(seconds >= 0 for seconds in work.parts.values())
    extents = len(spans(trace, "digest"))
    assert extents == len(spans(trace, "copy")) == len(trace.requests)
    rows = {span.row for span in spans(trace, "work")}
    for row in rows:
        whole = [span for span in spans(trace, "work") if span.row == row]
        inside = [span for span in trace.spans if span.row == row and span.name != "work"]
        for span in inside:
            assert any(one.begin <= span.begin and span.end <= one.end + 1e-6 for one in whole)


def test_a_load_is_accounted_for(tmp_path):
    penstock.save(tmp_path / "ckpt", state())
    trace, _ = best_traced(tmp_path / "trace.json", lambda _: penstock.load(tmp_path / "ckpt"))
    (call,) = summary.calls(trace)
    assert (call.name, call.role) == ("load", "stall")
    phases = [name for name in call.phases if not name.startswith("hand")]
    assert phases == ["open", "plan", "read", "build"]
    assert call.accounted >= 0.95
    assert {"digest", "submit"} <= set(summary.work(trace)[0].parts)


def test_what_stalls_and_what_goes_on_beside(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store", keep_last=1)

    def work():
        for step in range(3):
            pending = store.save_async(step, state())
        pending.result()
        store.save(3, state())

    trace, _ = traced(tmp_path / "trace.json", work)
    found = {(call.name, call.role): call for call in summary.calls(trace)}
    stalls = {("save_async", "stall"), ("wait", "stall"), ("save", "stall")}
    assert found.keys() == {*stalls, ("save", "background")}
    assert {"flatten", "stage"} <= found["save_async", "stall"].phases.keys()
    background = found["save", "background"]
    assert background.times == 3
    assert {"begin", "write", "commit", "retire"} <= background.phases.keys()
    # On a busy machine other processes may run between two phases.
    assert background.accounted > 0.5
    details = {span.detail for span in trace.spans if span.row == "background"}
    assert details == {store.path(step) for step in range(3)}


def test_phases_of_a_run(tmp_path):
    penstock.save(tmp_path / "old", state())

    def work():
        penstock.load(tmp_path / "old")
        time.sleep(0.3)
        penstock.save(tmp_path / "new", state())
        penstock.load(tmp_path / "new")

    trace, _ = traced(tmp_path / "trace.json", work)
    phases = {phase.name: phase for phase in summary.phases(trace)}
    assert phases["compute"].seconds >= 0.3
    assert all(phases[name].seconds > 0 for name in ("start-up", "checkpoint", "load"))
    assert sum(phase.seconds for phase in phases.values()) == pytest.approx(trace.seconds)
    # The kernel's counters are sampled ten times a second, so phases are separated roughly.
    assert sum(phase.written_bytes for phase in phases.values()) >= 48 * MIB
    moments = summary.moments(trace, 10)
    assert sum(one.written_bytes for one in moments) == pytest.approx(
        sum(phase.written_bytes for phase in phases.values())
    )


def test_requests_are_told_apart_by_size_and_alignment(tmp_path):
    trace, _ = traced(
        tmp_path / "trace.json",
        lambda: penstock.save(
            tmp_path / "ckpt",
            {**state(4), "odd": np.ones(3)},
            options=penstock.Options(direct="off", extent_bytes=MIB),
        ),
    )
    kinds = summary.requests(trace.requests)
    assert {kind.operation for kind in kinds} == {"write"}
    assert all(kind.direct == 0 for kind in kinds)
    full = next(kind for kind in kinds if kind.size == "1M-4M")
    assert (full.requests, full.nbytes, full.aligned) == (4, 4 * MIB, 1.0)
    # Without direct I/O the last request is not padded to a page.
    assert any(kind.aligned < 1 for kind in kinds)
    assert full.p50_ms <= full.p99_ms <= full.max_ms
    slowest = summary.slowest(trace, 3)
    assert [one.seconds for one in slowest] == sorted((s.seconds for s in slowest), reverse=True)


def test_a_failed_save_is_in_the_trace(tmp_path):
    penstock.save(tmp_path / "ckpt", state(1))

    def work():
        with pytest.raises(CheckpointExistsError):
            penstock.save(tmp_path / "ckpt", state(1))

    trace, _ = traced(tmp_path / "trace.json", work)
    (span,) = [span for span in spans(trace, "save") if span.row == "stall"]
    assert "CheckpointExistsError" in span.detail


def test_a_path_of_any_bytes_is_traced(tmp_path):
    path = os.fsencode(tmp_path) + b"/ck\xff"
    store = penstock.CheckpointStore(os.fsencode(tmp_path) + b"/st\xfe")

    def work():
        penstock.save(path, state(1))
        store.save_async(1, state(1)).result()

    trace, _ = traced(tmp_path / "trace.json", work)
    assert {call.name for call in summary.calls(trace)} == {"save", "save_async", "wait"}
    assert store.steps() == [1]


def test_what_the_block_raises_is_raised(tmp_path):
    penstock.save(tmp_path / "ckpt", state(1))

    def work():
        with penstock.trace("/dev/full"):
            penstock.load(tmp_path / "ckpt")
            raise KeyError("body")

    with pytest.raises(KeyError) as raised:
        work()
    assert "trace" in "".join(raised.value.__notes__)
    with pytest.raises(StorageError, match="/dev/full"), penstock.trace("/dev/full"):
        penstock.load(tmp_path / "ckpt")
    traced(tmp_path / "trace.json", lambda: penstock.load(tmp_path / "ckpt"))


def test_threads_that_trace_at_once_are_refused_and_no_trace_is_lost(tmp_path):
    made, unexpected = [], []

    def work(number):
        for attempt in range(30):
            path = tmp_path / f"{number}.{attempt}.json"
            try:
                with penstock.trace(path):
                    penstock.inspect(tmp_path / "ckpt")
                    with tracing.span("mine", str(path)):
                        pass
                made.append(path)
            except StorageError as error:
                unexpected.append(error)
            except penstock.PenstockError:
                pass

    penstock.save(tmp_path / "ckpt", state(1))
    on_threads(work, range(3))
    assert not unexpected
    assert made
    for path in made:
        assert str(path) in {span.detail for span in spans(recorded.read(path), "mine")}


def test_forked_children_may_trace_while_their_parent_does(tmp_path):
    code = f"""
        import numpy as np, os, penstock, threading
        state = {{"w": np.ones(1 << 18)}}
        stop = threading.Event()

        def work(number):
            while not stop.is_set():
                penstock.save({str(tmp_path)!r} + f"/ckpt{{number}}", state, overwrite=True)

        with penstock.trace({str(tmp_path / "parent.json")!r}):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for attempt in range(20):
                child = os.fork()
                if not child:
                    with penstock.trace({str(tmp_path)!r} + f"/child{{attempt}}.json"):
                        with penstock.common.tracing.span("in the child"):
                            pass
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
            stop.set()
            for thread in threads:
                thread.join()
    """
    ran = run(code)
    assert ran.returncode == 0, ran.stderr
    assert recorded.read(tmp_path / "parent.json").spans
    for attempt in range(20):
        trace = recorded.read(tmp_path / f"child{attempt}.json")
        assert [span.row for span in trace.spans] == ["caller"]


def test_waiting_for_a_save_is_no_computing(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")

    def work():
        store.save_async(1, state()).result()
        store.scrub()

    trace, _ = traced(tmp_path / "trace.json", work)
    found = {(call.name, call.role) for call in summary.calls(trace)}
    assert {("wait", "stall"), ("scrub", "stall")} <= found


def test_one_trace_at_a_time(tmp_path):
    with penstock.trace(tmp_path / "one.json"):
        second = penstock.trace(tmp_path / "two.json")
        with pytest.raises(penstock.PenstockError, match=r"one\.json"), second:
            pytest.fail("the block ran")
        penstock.save(tmp_path / "ckpt", state(1))
    assert not (tmp_path / "two.json").exists()
    assert recorded.read(tmp_path / "one.json").spans
    with penstock.trace(tmp_path / "three.json"):
        pass


def test_a_trace_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(StorageError, match="trace"), penstock.trace(tmp_path / "no/dir"):
        pytest.fail("the block ran")


def test_threads_that_save_at_once_have_rows_of_their_own(tmp_path):
    def save(index):
        penstock.save(tmp_path / f"ckpt{index}", state(24))

    def work():
        on_threads(save, range(3))

    trace, _ = traced(tmp_path / "trace.json", work)
    saves = [span for span in spans(trace, "save") if span.row.startswith("caller")]
    assert len(saves) == 3
    for row in {span.row for span in trace.spans}:
        own = [span for span in trace.spans if span.row == row]
        open_now = []
        for span in own:
            while open_now and open_now[-1].end <= span.begin + 1e-6:
                open_now.pop()
            assert not open_now or span.end <= open_now[-1].end + 1e-6, (span, open_now[-1])
            open_now.append(span)


SAVES = """
    import numpy as np, penstock, sys
    path = sys.argv[1] if len(sys.argv) > 1 else {path!r}
    penstock.save(path, {{"w": np.ones(1 << 20)}}, no_dist=True)
"""


def test_the_environment_asks_for_a_trace(tmp_path):
    ran = run(SAVES.format(path=str(tmp_path / "ckpt")), PENSTOCK_TRACE=str(tmp_path / "t.json"))
    assert ran.returncode == 0, ran.stderr
    trace = recorded.read(tmp_path / "t.json")
    assert [call.name for call in summary.calls(trace)] == ["save"]
    assert not trace.is_cut


def test_a_process_that_does_nothing_leaves_no_trace(tmp_path):
    ran = run("import penstock", PENSTOCK_TRACE=str(tmp_path / "t.json"))
    assert ran.returncode == 0, ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_trace_stops_no_run(tmp_path):
    ran = run(SAVES.format(path=str(tmp_path / "ckpt")), PENSTOCK_TRACE="/nowhere/at/all.json")
    assert ran.returncode == 0, ran.stderr
    assert "PENSTOCK_TRACE" in ran.stderr
    assert "/nowhere/at is no directory" in ran.stderr
    assert penstock.verify(tmp_path / "ckpt").ok


def test_children_leave_the_trace_of_their_parent_alone(tmp_path):
    code = f"""
        import multiprocessing, numpy as np, penstock

        def work(method):
            penstock.save({str(tmp_path)!r} + "/" + method, {{"w": np.ones(1 << 18)}})

        if __name__ == "__main__":
            penstock.save({str(tmp_path / "parent")!r}, {{"w": np.ones(1 << 20)}})
            for method in ("fork", "spawn"):
                child = multiprocessing.get_context(method).Process(target=work, args=(method,))
                child.start()
                child.join()
                assert child.exitcode == 0
            penstock.save({str(tmp_path / "again")!r}, {{"w": np.ones(1 << 20)}})
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PENSTOCK_TRACE": str(tmp_path / "t.json")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    own = recorded.read(tmp_path / "t.json")
    details = [span.detail for span in own.spans if span.row == "stall"]
    assert details == [str(tmp_path / "parent"), str(tmp_path / "again")]
    others = list(tmp_path.glob("t.*.json"))
    (other,) = [recorded.read(path) for path in others]
    assert [span.detail for span in spans(other, "save") if span.row == "stall"] == [
        str(tmp_path / "spawn")
    ]


def test_a_killed_process_leaves_a_readable_trace(tmp_path):
    code = f"""
        import numpy as np, penstock, time
        penstock.save({str(tmp_path / "ckpt")!r}, {{"w": np.ones(1 << 20)}})
        time.sleep(0.5)
        print("saved", flush=True)
        time.sleep(60)
    """
    path = tmp_path / "t.json"
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PENSTOCK_TRACE": str(path)},
        stdout=subprocess.PIPE,
    )
    assert child.stdout.readline() == b"saved\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    trace = recorded.read(path)
    assert trace.is_cut
    assert [call.name for call in summary.calls(trace)] == ["save"]
    whole = path.read_bytes()
    # At any end position.
    for length in range(len(whole) - 400, len(whole)):
        path.write_bytes(whole[:length])
        assert recorded.read(path).is_cut


def test_ranks_have_files_of_their_own(tmp_path):
    for rank in range(2):
        ran = run(
            SAVES.format(path=str(tmp_path / f"ckpt{rank}")),
            PENSTOCK_TRACE=str(tmp_path / "t.json"),
            RANK=str(rank),
            WORLD_SIZE="2",
        )
        assert ran.returncode == 0, ran.stderr
    paths = [tmp_path / f"t.rank{rank}.json" for rank in range(2)]
    assert [recorded.read(path).about["rank"] for path in paths] == [0, 1]
    merged = tmp_path / "merged.json"
    recorded.merge(paths, merged)
    found = json.loads(merged.read_text())
    assert {event["pid"] for event in found} == {1, 2}
    begins = {
        rank: min(event["ts"] for event in found if event["pid"] == rank + 1 and "ts" in event)
        for rank in range(2)
    }
    heads = [recorded.read(path).about["began_at_unix_ns"] for path in paths]
    assert begins[1] - begins[0] == pytest.approx((heads[1] - heads[0]) / 1e3, rel=0.5)


def test_processes_in_turn_do_not_overwrite_each_other(tmp_path):
    for number in range(2):
        ran = run(
            SAVES.format(path=str(tmp_path / f"ckpt{number}")),
            PENSTOCK_TRACE=str(tmp_path / "t.json"),
        )
        assert ran.returncode == 0, ran.stderr
    paths = sorted(tmp_path.glob("t*.json"))
    details = [recorded.read(path).spans[0].detail for path in paths]
    assert len(paths) == 2
    assert set(details) == {str(tmp_path / f"ckpt{number}") for number in range(2)}


def test_merging_leaves_what_it_reads_alone(tmp_path):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        traced(path, lambda path=path: penstock.save(f"{path}.ckpt", state(1)))
    (tmp_path / "link.json").symlink_to(paths[0])
    before = paths[0].read_bytes()
    ran = penstock_cli("trace", "merge", tmp_path / "link.json", *paths)
    assert ran.returncode == 2
    assert paths[0].read_bytes() == before
    merged = tmp_path / "merged.json"
    assert penstock_cli("trace", "merge", merged, *paths).returncode == 0
    ran = penstock_cli("trace", "summary", merged)
    assert ran.returncode == 1
    assert "several processes" in ran.stderr
    ran = penstock_cli("trace", "summary", *paths)
    assert ran.returncode == 0, ran.stderr
    assert len([line for line in ran.stdout.splitlines() if "process " in line]) >= 2


def test_a_pipe_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StorageError), penstock.trace(pipe):
        pytest.fail("the block ran")


def test_a_directory_gets_a_file_for_each_process(tmp_path):
    traces = tmp_path / "traces"
    traces.mkdir()
    ran = run(SAVES.format(path=str(tmp_path / "ckpt")), PENSTOCK_TRACE=str(traces))
    assert ran.returncode == 0, ran.stderr
    (path,) = traces.iterdir()
    assert recorded.read(path).spans


def penstock_cli(*arguments):
    return run_command(*arguments, COLUMNS="80")


def test_the_summary_fits_a_terminal(tmp_path):
    path = tmp_path / "trace.json"
    traced(path, lambda: penstock.load(penstock.save(tmp_path / "ckpt", state()).path))
    ran = penstock_cli("trace", "summary", path)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines[1:])
    trace = recorded.read(path)
    for kind in summary.requests(trace.requests):
        assert f"{kind.operation} {kind.size}" in ran.stdout
        assert f"{kind.requests:,}" in ran.stdout
    for words in ("save", "commit", "digest", "1M-4M", "checkpoint", "shard-00000-00.safetensors"):
        assert words in ran.stdout
    ran = penstock_cli("trace", "summary", "--json", path)
    (plain,) = json.loads(ran.stdout)["traces"]
    assert {call["name"] for call in plain["calls"]} == {"save", "load"}
    assert plain["slowest"][0]["file"].endswith(".safetensors")


HEAD = b'[\n{"name":"penstock","ph":"M","args":{"version":1,"began_at_unix_ns":1}},\n'
HOSTILE = (
    b'{"ph":"X"}',
    b"nonsense,\n{}",
    b"[1]",
    b"[" * 100_000 + b",\n{}",
    b'{"name":"thread_name","ph":"M","tid":1,"args":{"name":7}}',
    b'{"name":"x","ph":"X","tid":1,"ts":0,"dur":1}',
    b'{"name":["x"],"ph":"M","args":{}}',
    b'{"name":"x","ph":"C","ts":0,"args":[1]}',
    b'{"name":"x","ph":"C","ts":0,"args":{"GiB/s":null}}',
    b'{"name":"x","ph":"C","ts":NaN,"args":{"GiB/s":1}}',
    b'{"name":"x","ph":"C","ts":Infinity,"args":{"GiB/s":1}}',
    b'{"name":"x","ph":"C","ts":-1,"args":{"GiB/s":1}}',
    b'{"name":"x","ph":"C","ts":0,"args":{"GiB/s":1e308}}',
    b'{"name":"x","ph":"C","ts":1' + b"0" * 400 + b',"args":{"GiB/s":1}}',
    b'{"name":"x","ph":"e","ts":0,"id2":{"local":"1"}}',
    b'{"name":"penstock end","ph":"M","args":{"lost":"x"}}',
    b'{"name":"penstock","ph":"M","args":{"version":1,"began_at_unix_ns":1}}',
)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'[\n{"name": "other"}\n]',
        b"\xff\xfe\x00",
        b'[\n{"name":"penstock","ph":"M","args":{"version":99}}\n]',
        b'[\n{"name":"penstock","ph":"M","args":null}\n]',
        b'[\n{"name":"penstock","ph":"M","args":{"version":1,"began_at_unix_ns":"x"}}\n]',
        *(HEAD + event + b"\n]\n" for event in HOSTILE),
        b'[\n{"name":"penstock","ph":"M","args":[]}\n]',
        b'[\n{"name":"penstock","ph":"M","args":{"version":"1"}}\n]',
    ],
)
def test_what_is_no_trace_is_named(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(recorded.TraceError, match=r"other\.json"):
        recorded.read(path)
    ran = penstock_cli("trace", "summary", path)
    assert ran.returncode == 1
    assert "other.json" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_missing_trace_is_an_error(tmp_path):
    ran = penstock_cli("trace", "summary", tmp_path / "none.json")
    assert ran.returncode == 1
    assert "none.json" in ran.stderr
    assert "Traceback" not in ran.stderr
