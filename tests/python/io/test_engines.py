"""Each path of the bytes and its fallbacks, as the report states them."""

from __future__ import annotations

import numpy as np
import pytest

import penstock
from compare import assert_same
from conftest import mounted, need_uring, run_child, supports_direct
from penstock.errors import CorruptCheckpointError, StorageError

# A container's seccomp profile in small: the three system calls of io_uring, which have the same
# numbers on every architecture, fail with a chosen errno.
REFUSE_URING = """
    import ctypes, errno, json, struct, sys

    def refuse_io_uring(number):
        LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
        program = b"".join(struct.pack("HBBI", *row) for row in [
            (LOAD, 0, 0, 0),
            (JUMP_EQUAL, 3, 0, 425),
            (JUMP_EQUAL, 2, 0, 426),
            (JUMP_EQUAL, 1, 0, 427),
            (RETURN, 0, 0, 0x7FFF0000),
            (RETURN, 0, 0, 0x00050000 | number),
        ])
        class Filter(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]
        libc = ctypes.CDLL(None, use_errno=True)
        filter_ = Filter(len(program) // 8, program)
        assert libc.prctl(38, 1, 0, 0, 0) == 0, ctypes.get_errno()
        assert libc.prctl(22, 2, ctypes.byref(filter_)) == 0, ctypes.get_errno()

    refuse_io_uring(int(sys.argv[2]))
    import numpy as np, penstock
"""

SAVE_WITHOUT_URING = (
    REFUSE_URING
    + """
    state = {"w": np.arange(1_000_000), "x": 1}
    report = penstock.save(sys.argv[1], state)
    reports = []
    loaded = penstock.load(sys.argv[1], report=reports.append)
    same = bool((loaded["w"] == state["w"]).all()) and loaded["x"] == 1
    ok = penstock.verify(sys.argv[1]).ok
    print(json.dumps([
        same and ok, report.engine, report.fallbacks, reports[0].engine, reports[0].fallbacks,
        report.direct_io,
    ]))
"""
)

INSIST_ON_URING = (
    REFUSE_URING
    + """
    import os
    results = []
    path = sys.argv[1]
    penstock.save(path + "-good", {"w": np.arange(1000)})
    for call in (
        lambda: penstock.save(path, {"w": np.arange(1000)}, options=options),
        lambda: penstock.load(path + "-good", options=options),
        lambda: penstock.verify(path + "-good", options=options),
    ):
        options = penstock.Options(engine="uring")
        try:
            call()
            results.append(None)
        except penstock.errors.StorageError as error:
            results.append([error.errno, str(error), os.path.exists(path)])
    print(json.dumps(results))
"""
)

EPERM, ENOSYS, ENOMEM = 1, 38, 12


@pytest.mark.parametrize("number", [EPERM, ENOSYS, ENOMEM])
def test_where_io_uring_is_refused_threads_do_the_work_and_the_report_says_why(disk_path, number):
    same, engine, fallbacks, load_engine, load_fallbacks, direct_io = run_child(
        SAVE_WITHOUT_URING, disk_path / "ckpt", number
    )
    assert same
    assert (engine, load_engine) == ("threads", "threads")
    for reasons in (fallbacks, load_fallbacks):
        assert len(reasons) == 1
        assert "io_uring" in reasons[0]
    assert direct_io


@pytest.mark.parametrize("number", [EPERM, ENOSYS])
def test_insisting_on_io_uring_where_it_is_refused_is_an_error_with_a_remedy(disk_path, number):
    results = run_child(INSIST_ON_URING, disk_path / "ckpt", number)
    assert all(result is not None for result in results)
    for error_number, text, exists in results:
        assert error_number == number
        assert "uring" in text
        assert 'engine="threads"' in text
        assert not exists


def test_the_report_says_which_path_the_bytes_took(disk_path, options):
    reports = [penstock.save(disk_path / "ckpt", {"w": np.arange(100_000)}, options=options)]
    penstock.load(disk_path / "ckpt", options=options, report=reports.append)
    for report in reports:
        assert report.engine == options.engine
        assert report.direct_io == (options.direct == "on")
        assert report.fallbacks == []
        assert report.seconds > 0
        assert report.gb_per_second > 0
        assert all(seconds >= 0 for seconds in report.phases.values())
    assert list(reports[0].phases) == ["flatten", "plan", "write", "sync", "commit"]
    assert set(reports[1].phases) == {"open", "read", "build"}


def test_by_default_the_best_path_is_taken(disk_path):
    need_uring()
    report = penstock.save(disk_path / "ckpt", {"w": np.arange(100_000)})
    assert (report.engine, report.direct_io, report.fallbacks) == ("uring", True, [])


def test_a_state_without_tensors_can_be_saved_with_any_path(disk_path, options):
    penstock.save(disk_path / "ckpt", {"x": [1]}, options=options)
    assert penstock.load(disk_path / "ckpt", options=options) == {"x": [1]}


@pytest.mark.parametrize("kind", ["ramfs", "tmpfs"])
def test_a_file_system_without_direct_io_is_used_and_the_report_says_so(tmp_path, need_root, kind):
    with mounted(kind, tmp_path / "memory", 64 << 20) as directory:
        if kind == "ramfs":
            assert not supports_direct(directory)
        state = {"w": np.arange(100_000), "x": 1}
        reports = [penstock.save(directory / "ckpt", state)]
        assert_same(penstock.load(directory / "ckpt", report=reports.append), state)
        for report in reports:
            assert not report.direct_io
            assert len(report.fallbacks) >= 1
            assert any("O_DIRECT" in reason or kind in reason for reason in report.fallbacks)
        assert penstock.verify(directory / "ckpt").ok


def test_insisting_on_direct_io_without_it_is_an_error_with_a_remedy(tmp_path, need_root):
    with mounted("ramfs", tmp_path / "memory", 64 << 20) as directory:
        penstock.save(directory / "good", {"w": np.arange(1000)})
        options = penstock.Options(direct="on")
        with pytest.raises(StorageError, match='direct="auto"') as raised:
            penstock.save(directory / "ckpt", {"w": np.arange(1000)}, options=options)
        assert raised.value.filename.startswith(str(directory))
        assert not (directory / "ckpt").exists()
        with pytest.raises(StorageError, match='direct="auto"'):
            penstock.load(directory / "good", options=options)


# Settings from the environment.


@pytest.mark.parametrize(
    ("name", "text", "check"),
    [
        ("ENGINE", "threads", lambda save, load: save.engine == load.engine == "threads"),
        ("DIRECT", "off", lambda save, load: not save.direct_io and not load.direct_io),
        ("QUEUE_DEPTH", "3", lambda save, load: save.queue_depth == load.queue_depth == 3),
        ("EXTENT_BYTES", "2097152", lambda save, load: save.extent_bytes == 2097152),
        ("IO_THREADS", "2", lambda save, load: save.io_threads == 2),
        ("STAGING_BYTES", "12000000", lambda save, load: save.staging_peak_bytes <= 12000000),
        ("SHARD_BYTES", "4096", lambda save, load: save.files == 6),
        ("VERIFY", "off", lambda save, load: not load.verified),
    ],
)
def test_a_variable_of_the_environment_decides(disk_path, monkeypatch, name, text, check):
    monkeypatch.setenv(f"PENSTOCK_{name}", text)
    state = [np.zeros(1 << 20, np.uint8) for _ in range(4)]
    save = penstock.save(disk_path / "ckpt", state)
    reports = []
    penstock.load(disk_path / "ckpt", report=reports.append)
    assert check(save, reports[0])


def test_what_the_caller_says_goes_before_the_environment(disk_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_ENGINE", "uring")
    options = penstock.Options(engine="threads")
    assert penstock.save(disk_path / "ckpt", np.ones(9), options=options).engine == "threads"


@pytest.mark.parametrize(
    ("name", "text"), [("ENGINE", "turbo"), ("QUEUE_DEPTH", "many"), ("VERIFY", "perhaps")]
)
def test_a_variable_that_makes_no_sense_is_named(tmp_path, monkeypatch, name, text):
    monkeypatch.setenv(f"PENSTOCK_{name}", text)
    with pytest.raises(ValueError, match=text) as raised:
        penstock.save(tmp_path / "ckpt", {})
    assert name.lower() in str(raised.value).lower()
    assert not (tmp_path / "ckpt").exists()


def test_damage_is_found_with_every_engine_and_extent(disk_path, options):
    penstock.save(disk_path / "ckpt", np.zeros(3 << 20, np.uint8), options=options)
    (file,) = (disk_path / "ckpt").glob("*.safetensors")
    with open(file, "r+b") as opened:
        opened.seek(2 << 20)
        opened.write(b"\1")
    chosen = penstock.Options(engine=options.engine, direct=options.direct, extent_bytes=1 << 20)
    with pytest.raises(CorruptCheckpointError) as raised:
        penstock.load(disk_path / "ckpt", options=chosen)
    assert raised.value.offset == 2 << 20
