"""`penstock.Options`: defaults, the environment, and what is refused."""

import dataclasses

import pytest

import penstock

NUMBERS = ["queue_depth", "extent_bytes", "io_threads", "staging_bytes", "shard_bytes"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for field in dataclasses.fields(penstock.Options):
        monkeypatch.delenv(f"PENSTOCK_{field.name.upper()}", raising=False)


def test_defaults_leave_every_number_to_the_engine():
    options = penstock.Options()
    assert (options.engine, options.direct, options.verify) == ("auto", "auto", True)
    assert all(getattr(options, name) is None for name in NUMBERS)


def test_the_environment_gives_defaults(monkeypatch):
    monkeypatch.setenv("PENSTOCK_ENGINE", "threads")
    monkeypatch.setenv("PENSTOCK_DIRECT", "off")
    monkeypatch.setenv("PENSTOCK_QUEUE_DEPTH", "7")
    monkeypatch.setenv("PENSTOCK_VERIFY", "No")
    options = penstock.Options()
    assert (options.engine, options.direct, options.queue_depth) == ("threads", "off", 7)
    assert options.verify is False


def test_arguments_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("PENSTOCK_ENGINE", "threads")
    assert penstock.Options(engine="auto").engine == "auto"


def test_an_empty_variable_is_no_variable(monkeypatch):
    monkeypatch.setenv("PENSTOCK_QUEUE_DEPTH", " ")
    assert penstock.Options().queue_depth is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [("QUEUE_DEPTH", "many"), ("VERIFY", "perhaps"), ("STAGING_BYTES", "64MiB")],
)
def test_a_bad_variable_is_named(monkeypatch, variable, value):
    monkeypatch.setenv(f"PENSTOCK_{variable}", value)
    with pytest.raises(ValueError, match=f"PENSTOCK_{variable}='{value}'"):
        penstock.Options()


def test_a_variable_out_of_range_is_refused(monkeypatch):
    monkeypatch.setenv("PENSTOCK_IO_THREADS", "0")
    with pytest.raises(ValueError, match="io_threads=0: must be between 1 and"):
        penstock.Options()


@pytest.mark.parametrize(
    "arguments",
    [
        {"engine": "io_uring"},
        {"direct": "yes"},
        {"queue_depth": 0},
        {"queue_depth": 5000},
        {"extent_bytes": 1 << 19},
        {"extent_bytes": (1 << 20) + 4096},
        {"extent_bytes": 1 << 31},
        {"io_threads": -1},
        {"staging_bytes": 1 << 20},
        {"extent_bytes": 64 << 20, "staging_bytes": 64 << 20},
        {"shard_bytes": 100},
    ],
)
def test_values_out_of_range_are_refused(arguments):
    with pytest.raises(ValueError, match=list(arguments)[-1]):
        penstock.Options(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"engine": None},
        {"direct": True},
        {"queue_depth": 1.0},
        {"queue_depth": True},
        {"verify": 1},
        {"staging_bytes": "1"},
    ],
)
def test_values_of_wrong_type_are_refused(arguments):
    with pytest.raises(TypeError, match=next(iter(arguments))):
        penstock.Options(**arguments)


def test_options_are_immutable_and_replaceable():
    options = penstock.Options(queue_depth=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.queue_depth = 5
    assert dataclasses.replace(options, io_threads=2).queue_depth == 4
    with pytest.raises(ValueError, match="io_threads"):
        dataclasses.replace(options, io_threads=0)


def test_the_native_form_has_every_field():
    options = penstock.Options(extent_bytes=2 << 20)
    assert options.to_native() == dataclasses.asdict(options)


def test_calls_refuse_anything_but_options(tmp_path):
    with pytest.raises(TypeError, match=r"penstock\.Options"):
        penstock.save(tmp_path / "ckpt", {}, options={"engine": "threads"})
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize("engine", ["uring", "threads"])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_the_report_names_the_path_that_ran(tmp_path, engine, direct):
    options = penstock.Options(engine=engine, direct=direct, io_threads=1, queue_depth=2)
    try:
        report = penstock.save(tmp_path / "ckpt", {"x": bytearray(1 << 20)}, options=options)
    except penstock.StorageError as error:
        if engine == "uring":
            pytest.skip(f"io_uring is refused here: {error}")
        raise
    assert report.engine == engine
    assert (report.io_threads, report.queue_depth) == (1, 2)
    assert report.direct_io is False or direct == "auto"
    assert set(report.phases) == {"flatten", "plan", "write", "sync", "commit"}
    assert report.gb_per_second > 0


def test_the_report_says_what_was_chosen_and_why(disk_path):
    state = {"x": bytearray(40 << 20)}
    report = penstock.save(disk_path / "auto", state)
    chosen = dict(choice.partition(": ")[0].split("=") for choice in report.choices)
    assert set(chosen) == {"extent_bytes", "io_threads", "queue_depth"}
    assert int(chosen["io_threads"]) == report.io_threads
    assert int(chosen["extent_bytes"]) == report.extent_bytes
    assert int(chosen["queue_depth"]) == report.queue_depth
    assert all(choice.partition(": ")[2] for choice in report.choices)
    assert report.engine_setup
    assert report.device is None or report.device


def test_what_staging_has_no_room_for_is_named(disk_path):
    options = penstock.Options(io_threads=2, queue_depth=64, staging_bytes=8 << 20)
    report = penstock.save(disk_path / "ckpt", {"x": bytearray(40 << 20)}, options=options)
    assert report.io_threads * report.queue_depth * report.extent_bytes <= 8 << 20
    named = [choice for choice in report.choices if choice.startswith("queue_depth=")]
    assert len(named) == 1
    assert "staging_bytes holds 7 extents, too few for 64" in named[0]


def test_little_data_takes_one_thread(disk_path):
    assert penstock.save(disk_path / "ckpt", {"x": bytearray(1 << 20)}).io_threads == 1
