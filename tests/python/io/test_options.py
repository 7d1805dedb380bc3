"""`penstock.Options`: defaults, the environment, files of them, and what is refused."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest

import penstock
from penstock import _native
from penstock.common.option_kinds import Number, Word
from penstock.errors import OptionsError, StorageError

FIELDS = {field.name: field for field in dataclasses.fields(penstock.Options)}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for field in FIELDS.values():
        monkeypatch.delenv(field.metadata["variable"], raising=False)
    monkeypatch.delenv("PENSTOCK_OPTIONS", raising=False)


def test_defaults_leave_every_number_to_the_engine():
    options = penstock.Options()
    assert (options.engine, options.direct, options.verify) == ("auto", "auto", True)
    open_ones = {
        name
        for name, field in FIELDS.items()
        if isinstance(field.metadata["kind"], Number) and field.metadata["kind"].is_open
    }
    assert all(getattr(options, name) is None for name in open_ones)
    assert FIELDS.keys() - open_ones == {
        "engine",
        "direct",
        "verify",
        "zero_copy",
        "rank_timeout_seconds",
    }


def words_of(number):
    """Returns the documented limits of a number."""
    units = {50: "PiB", 40: "TiB", 30: "GiB", 20: "MiB", 10: "KiB"}

    def text(value):
        if number.unit == "bytes":
            for bits, unit in units.items():
                if value >= 1 << bits:
                    return f"{value >> bits} {unit}"
        return str(value)

    return f"{text(number.least)} to {text(number.most)}"


def test_every_option_is_documented_with_its_limits_and_its_variable():
    attributes = penstock.Options.__doc__.partition("Attributes:")[2].partition("Raises:")[0]
    paragraphs = dict(re.findall(r"^ {8}(\w+): ((?:.+\n)(?: {12}.+\n)*)", attributes, re.MULTILINE))
    assert list(paragraphs) == list(FIELDS)
    for name, field in FIELDS.items():
        kind = field.metadata["kind"]
        text = " ".join(paragraphs[name].split())
        assert field.metadata["variable"] == f"PENSTOCK_{name.upper()}"
        kind.check(name, field.metadata["default"])
        if isinstance(kind, Word):
            assert all(f'``"{word}"``' in text for word in kind.words)
        if isinstance(kind, Number):
            assert words_of(kind) in text, name
            assert kind.unit in name or kind.unit in ("requests", "threads")


@pytest.mark.parametrize("name", FIELDS)
def test_what_an_option_may_be_comes_through_its_variable_and_nothing_else_does(name, monkeypatch):
    kind, variable = (FIELDS[name].metadata[key] for key in ("kind", "variable"))
    wrong = "perhaps"
    if isinstance(kind, Number):
        for value in (kind.least, kind.most):
            monkeypatch.setenv(variable, str(value))
            assert getattr(penstock.Options(), name) == value
        wrong = str(kind.most + 1)
    monkeypatch.setenv(variable, wrong)
    with pytest.raises(ValueError, match=wrong):
        penstock.Options()


@pytest.mark.parametrize("name", FIELDS)
def test_every_option_reaches_the_engine_or_the_ranks(name, tmp_path):
    """The native module refuses unknown options, so each one has an effect."""
    given = penstock.Options().to_native()
    _native.verify(saved(tmp_path), options={name: given[name]}, progress=None)
    with pytest.raises(ValueError, match=f"{name}s"):
        _native.verify(saved(tmp_path), options={f"{name}s": given[name]}, progress=None)


def saved(directory):
    path = directory / "ckpt"
    if not path.exists():
        penstock.save(path, {"n": 1})
    return str(path)


@pytest.mark.parametrize("number", [0, 1, 2**64 - 1])
def test_no_number_breaks_the_engine(number, tmp_path):
    numbers = [name for name, one in FIELDS.items() if isinstance(one.metadata["kind"], Number)]
    path = tmp_path / "ckpt"
    penstock.save(path, {"x": bytearray(5 << 20)})
    for name in numbers:
        options = {**penstock.Options().to_native(), name: number}
        result = _native.verify(str(path), options=options, progress=None)
        assert result["problems"] == []


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
    except StorageError as error:
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
    assert set(chosen) - {"zero_copy"} == {"extent_bytes", "io_threads", "queue_depth"}
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


def test_options_come_back_from_their_file(tmp_path):
    path = tmp_path / "options.json"
    options = penstock.Options(
        engine="threads", direct="off", queue_depth=5, extent_bytes=4 << 20, io_threads=3,
        staging_bytes=64 << 20, verify=False, shard_bytes=1 << 30, rank_timeout_seconds=9,
    )  # fmt: skip
    options.write(path, about={"by": "hand"})
    assert penstock.Options.read(path) == penstock.Options.read(str(path)) == options
    assert json.loads(path.read_text())["about"] == {"by": "hand"}


def test_a_file_holds_what_differs_from_the_defaults_and_nothing_else(tmp_path):
    path = tmp_path / "options.json"
    penstock.Options(queue_depth=32).write(path)
    assert json.loads(path.read_text()) == {"queue_depth": 32}
    penstock.Options().write(path)
    assert json.loads(path.read_text()) == {}
    assert penstock.Options.read(path) == penstock.Options()
    assert os.listdir(tmp_path) == ["options.json"]


def test_arguments_win_over_variables_and_those_over_the_file_of_the_environment(
    tmp_path, monkeypatch
):
    path = tmp_path / "options.json"
    penstock.Options(queue_depth=3, io_threads=2, engine="threads").write(path)
    monkeypatch.setenv("PENSTOCK_OPTIONS", str(path))
    monkeypatch.setenv("PENSTOCK_IO_THREADS", "5")
    options = penstock.Options(engine="auto")
    assert (options.engine, options.io_threads, options.queue_depth) == ("auto", 5, 3)
    assert options.extent_bytes is None


def test_a_file_that_is_read_wins_over_variables(tmp_path, monkeypatch):
    path = tmp_path / "options.json"
    path.write_text('{"queue_depth": 3, "extent_bytes": null}')
    monkeypatch.setenv("PENSTOCK_QUEUE_DEPTH", "7")
    monkeypatch.setenv("PENSTOCK_EXTENT_BYTES", "1048576")
    monkeypatch.setenv("PENSTOCK_IO_THREADS", "5")
    options = penstock.Options.read(path)
    assert (options.queue_depth, options.extent_bytes, options.io_threads) == (3, None, 5)


def test_the_file_of_the_environment_is_what_calls_go_by_and_is_read_once(tmp_path, monkeypatch):
    path = tmp_path / "options.json"
    penstock.Options(queue_depth=3, engine="threads").write(path)
    monkeypatch.setenv("PENSTOCK_OPTIONS", str(path))
    state = {"x": bytearray(1 << 20)}
    report = penstock.save(tmp_path / "ckpt", state)
    assert (report.engine, report.queue_depth) == ("threads", 3)
    path.unlink()
    assert penstock.Options().queue_depth == 3


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ('{"queue_depht": 3}', "queue_depht", "no option 'queue_depht': remove it; known are eng"),
        ('{"queue_depth": 0}', "queue_depth", "queue_depth=0: must be between 1 and 4096; correct"),
        ('{"queue_depth": "3"}', "queue_depth", "queue_depth='3': must be an int"),
        ('{"queue_depth": true}', "queue_depth", "queue_depth=True: must be an int"),
        ('{"engine": "io_uring"}', "engine", "must be one of 'auto', 'uring', 'threads'"),
        ('{"verify": 1}', "verify", "must be True or False"),
        ('{"staging_bytes": 4194304, "extent_bytes": 16777216}', "extent_bytes", "staging_bytes"),
        ("[3]", None, "one JSON object"),
        ("engine = 'threads'", None, "one JSON object"),
        ("[" * 100_000, None, "one JSON object"),
        ("\udcff", None, "one JSON object"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_name(tmp_path, monkeypatch, text, key, message):
    path = tmp_path / "options.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(OptionsError, match=r"options\.json") as caught:
        penstock.Options.read(path)
    assert message in str(caught.value)
    assert (caught.value.path, caught.value.key) == (str(path), key)
    monkeypatch.setenv("PENSTOCK_OPTIONS", str(path))
    with pytest.raises(ValueError, match=r"^PENSTOCK_OPTIONS: .*options\.json"):
        penstock.Options()
    # With all options given, neither file nor environment is read.
    fields = dataclasses.fields(penstock.Options)
    given = {field.name: field.metadata["default"] for field in fields}
    assert penstock.Options(**given).engine == "auto"


def test_a_file_that_is_not_there_is_named_with_its_variable(tmp_path, monkeypatch):
    with pytest.raises(OptionsError, match=r"nowhere\.json: options cannot be read: No such"):
        penstock.Options.read(tmp_path / "nowhere.json")
    monkeypatch.setenv("PENSTOCK_OPTIONS", str(tmp_path / "nowhere.json"))
    with pytest.raises(OptionsError, match=r"PENSTOCK_OPTIONS: .*nowhere\.json"):
        penstock.save(tmp_path / "ckpt", {})
    assert not (tmp_path / "ckpt").exists()


def test_the_command_line_refuses_a_wrong_file_before_it_does_anything(tmp_path):
    path = tmp_path / "options.json"
    path.write_text('{"queue_depht": 3}')
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "ls", str(tmp_path)],
        env={**os.environ, "PENSTOCK_OPTIONS": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "there is no option 'queue_depht'" in " ".join(done.stderr.split())


def test_options_that_cannot_be_written_leave_what_was_there(tmp_path):
    with pytest.raises(StorageError, match="cannot be written there: No such file"):
        penstock.Options().write(tmp_path / "nowhere" / "options.json")
    path = tmp_path / "options.json"
    penstock.Options(queue_depth=3).write(path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        penstock.Options(queue_depth=4).write(path, about={"gain": float("nan")})
    assert penstock.Options.read(path).queue_depth == 3
    (tmp_path / "directory").mkdir()
    with pytest.raises(StorageError, match="directory: options cannot be written"):
        penstock.Options().write(tmp_path / "directory")
    assert sorted(os.listdir(tmp_path)) == ["directory", "options.json"]
