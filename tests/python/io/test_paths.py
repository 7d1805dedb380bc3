"""A URL is one of a bucket, or refused; none makes a directory named ``s3:``."""

from __future__ import annotations

import os
import pathlib

import pytest
from click.testing import CliRunner

import penstock
from conftest import run_child
from penstock import _native
from penstock.cli import cli
from penstock.common import paths
from penstock.errors import UnsupportedPathError
from penstock.integrations.dcp import StorageReader, StorageWriter

URLS = ["hf://a/b", "file:///data/run", "a+b.c-1://x", "http://host/s3://bucket/run"]

BUCKETS = ["s3://bucket/run", "S3://b", "s3:/bucket/run"]


def test_the_schemes_are_those_of_the_native_module():
    assert tuple(_native.OBJECT_SCHEMES) == paths.OBJECT_SCHEMES


CALLS = {
    "save": lambda path: penstock.save(path, {"x": 1}),
    "load": penstock.load,
    "inspect": penstock.inspect,
    "verify": penstock.verify,
    "explain": penstock.explain,
    "salvage": lambda path: penstock.salvage(path, "out"),
    "salvage out": lambda path: penstock.salvage("ckpt", path),
    "store": penstock.CheckpointStore,
    "dcp writer": StorageWriter,
    "dcp reader": StorageReader,
    "dcp reset": lambda path: StorageWriter("ckpt").reset(path),
    "remote": lambda path: penstock.set_remote(path, None),
}

LOCAL_CALLS = {
    "options": penstock.Options.read,
    "options out": penstock.Options().write,
    "metrics": penstock.metrics.write_textfile,
    "export": lambda path: penstock.export("ckpt", path, key=""),
    "import": lambda path: penstock.import_model(path, "out"),
    "table": penstock.features.Table,
}


def trace(path):
    with penstock.trace(path):
        pass


LOCAL_CALLS["trace"] = trace


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    penstock.save("ckpt", {"x": 1})
    return tmp_path


@pytest.mark.parametrize("call", (CALLS | LOCAL_CALLS).values(), ids=CALLS | LOCAL_CALLS)
def test_a_url_of_anything_but_a_bucket_is_refused_and_nothing_is_made(here, call):
    check_refused(here, call, URLS)


@pytest.mark.parametrize("call", LOCAL_CALLS.values(), ids=LOCAL_CALLS)
def test_what_is_for_files_takes_no_bucket(here, call):
    check_refused(here, call, BUCKETS)


def check_refused(here, call, urls):
    before = sorted(here.rglob("*"))
    for url in urls:
        # `pathlib` merges two slashes into one.
        for path in (url, pathlib.PurePosixPath(url)):
            with pytest.raises(UnsupportedPathError, match="absolute path") as raised:
                call(path)
            assert raised.value.scheme == url.partition(":")[0]
            assert raised.value.path == str(path)
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_url_names_a_bucket_and_a_key_and_no_more(here, call):
    for url in ("s3://bucket/run?region=x", "s3://b?endpoint=y/z", "s3://bucket/a#b"):
        with pytest.raises(UnsupportedPathError, match=r"penstock\.set_remote"):
            call(url)
    for url in ("s3://", "s3:///run"):
        with pytest.raises(UnsupportedPathError, match="s3://BUCKET/DIRECTORY"):
            call(url)


def test_the_plain_path_is_the_way_out_of_a_file_url(here):
    for url in ("file:///data/run", "file:/data/run", "file://localhost/data/run"):
        with pytest.raises(UnsupportedPathError, match="plain path, '/data/run'"):
            penstock.load(url)
    with pytest.raises(UnsupportedPathError, match="copy between"):
        penstock.load("file://elsewhere/data/run")


@pytest.fixture
def home(here, monkeypatch):
    """Makes a home directory with a checkpoint; the working directory is another one."""
    home = here / "home"
    home.mkdir()
    penstock.save(home / "ckpt", {"x": 1})
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.mark.parametrize("path", ["~/ckpt", b"~/ckpt", pathlib.Path("~/ckpt")])
def test_a_tilde_is_the_home_directory(home, path):
    for call in (penstock.load, penstock.inspect, penstock.verify, penstock.explain):
        call(path)
    penstock.save("~/new", {"x": 2})
    assert penstock.load(home / "new") == {"x": 2}
    store = penstock.CheckpointStore("~/store")
    store.save(3, {"x": 3})
    assert penstock.CheckpointStore(home / "store").load() == {"x": 3}
    penstock.Options(queue_depth=32).write("~/options.json")
    assert penstock.Options.read("~/options.json").queue_depth == 32
    trace("~/trace.json")
    penstock.features.Table.create("~/table", 4, {"a": (2, "float32")}).close()
    penstock.features.Table("~/table").close()
    assert {"new", "store", "options.json", "trace.json", "table"} <= set(os.listdir(home))
    assert not os.path.lexists("~")


def test_a_tilde_that_stands_elsewhere_is_a_character(here):
    for path in ("a~", "a/~/b", here / "~"):
        penstock.save(path, {"x": 1})
        assert penstock.load(path) == {"x": 1}
    assert (here / "~").is_dir()


@pytest.mark.parametrize(
    "command",
    [
        *(["ls", "~"], ["inspect", "~/ckpt"], ["verify", "~/ckpt"], ["diff", "~/ckpt", "~/ckpt"]),
        *(["doctor", "~", "--no-measure"], ["sweep", "~"], ["salvage", "~/ckpt", "~/out"]),
    ],
    ids=" ".join,
)
def test_a_tilde_that_the_shell_left_is_expanded_by_commands(home, command):
    """As in `--files=~/base`, which shells do not expand."""
    done = CliRunner().invoke(cli, command, standalone_mode=False)
    # The doctor may have findings about this machine.
    assert done.exception is None
    assert done.return_value == 0 or command[0] == "doctor"
    assert not os.path.lexists("~")


def test_bytes_are_looked_at_as_well(here):
    with pytest.raises(UnsupportedPathError):
        penstock.load(b"hf://bucket/run")


def test_a_directory_that_is_really_named_so_has_an_absolute_path(here):
    path = here / "s3:" / "run"
    penstock.save(path, {"x": 1})
    assert penstock.load(path) == penstock.load("./s3:/run") == {"x": 1}


@pytest.mark.parametrize("path", ["run:1", "a/s3:/b", "2026-01-01 10:30/x", "..", "x:y/z"])
def test_colons_are_as_good_as_any_other_character(here, path):
    penstock.save(path, {"x": 1}, overwrite=True)
    assert penstock.load(path) == {"x": 1}


COMMANDS = [
    *(["ls", "URL"], ["inspect", "URL"], ["verify", "URL"], ["verify", "--explain", "URL"]),
    *(["scrub", "URL"], ["sweep", "URL"], ["salvage", "URL", "out"], ["salvage", "ckpt", "URL"]),
    *(["diff", "ckpt", "URL"], ["export", "URL", "out"]),
]

LOCAL_COMMANDS = [
    *(["bench", "io", "URL"], ["demo", "--directory", "URL"], ["export", "ckpt", "URL"]),
    *(["bench", "io", "--output", "URL"], ["bench", "compare", "URL", "URL"]),
    *(["bench", "checkpoint", "URL"], ["trace", "summary", "URL"], ["trace", "merge", "URL", "a"]),
]


@pytest.mark.parametrize("command", COMMANDS + LOCAL_COMMANDS, ids=" ".join)
def test_no_command_takes_a_url_of_anything_but_a_bucket(here, command):
    check_command(command, "hf://bucket/run")


@pytest.mark.parametrize("command", LOCAL_COMMANDS, ids=" ".join)
def test_a_command_that_is_for_files_takes_no_bucket(here, command):
    check_command(command, "s3://bucket/run")


def check_command(command, url):
    before = sorted(os.listdir())
    done = CliRunner().invoke(cli, [word.replace("URL", url) for word in command])
    assert done.exit_code == 2, done.output
    assert "is a URL" in " ".join(done.output.split())
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("variable", ["PENSTOCK_TRACE", "PENSTOCK_OPTIONS"])
def test_no_variable_of_the_environment_does(here, monkeypatch, variable):
    monkeypatch.setenv(variable, "s3://bucket/x")
    said = run_child(
        """
        import json, os, warnings
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            import penstock
        said = [str(one.message) for one in told]
        try:
            penstock.Options()
        except penstock.errors.OptionsError as error:
            said.append(str(error))
        print(json.dumps([said, os.listdir()]))
        """
    )
    assert len(said[0]) == 1
    assert said[0][0].startswith(variable)
    assert "is a URL" in said[0][0]
    assert "s3:" not in said[1]


def test_dcp_leaves_urls_to_others():
    for url in URLS:
        assert not StorageWriter.validate_checkpoint_id(url)
        assert not StorageReader.validate_checkpoint_id(url)
    for path in (*BUCKETS, pathlib.PurePosixPath("s3://b/k"), "runs/a:b"):
        assert StorageWriter.validate_checkpoint_id(path)
        assert StorageReader.validate_checkpoint_id(path)
