"""A path with a scheme is refused wherever one is taken, and makes no directory named ``s3:``."""

from __future__ import annotations

import os
import pathlib
from contextlib import suppress

import pytest
from click.testing import CliRunner

import penstock
from conftest import run_child
from penstock.cli import cli
from penstock.integrations.dcp import StorageReader, StorageWriter

URLS = [
    "s3://bucket/run",
    "gs://bucket/run",
    "S3://b",
    "hf://a/b",
    "file:///data/run",
    "a+b.c-1://x",
]

CALLS = {
    "save": lambda path: penstock.save(path, {"x": 1}),
    "load": penstock.load,
    "inspect": penstock.inspect,
    "verify": penstock.verify,
    "explain": penstock.explain,
    "salvage": lambda path: penstock.salvage(path, "out"),
    "salvage out": lambda path: penstock.salvage("ckpt", path),
    "store": penstock.CheckpointStore,
    "options": penstock.Options.read,
    "options out": penstock.Options().write,
    "metrics": penstock.metrics.write_textfile,
    "dcp writer": StorageWriter,
    "dcp reader": StorageReader,
    "dcp reset": lambda path: StorageWriter("ckpt").reset(path),
}


def trace(path):
    with penstock.trace(path):
        pass


CALLS["trace"] = trace


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    penstock.save("ckpt", {"x": 1})
    return tmp_path


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_url_is_refused_and_nothing_is_made(here, call):
    before = sorted(here.rglob("*"))
    for url in URLS:
        # `pathlib` makes one slash of two.
        for path in (url, pathlib.PurePosixPath(url)):
            with pytest.raises(penstock.UnsupportedPathError, match="absolute path") as raised:
                call(path)
            assert raised.value.scheme == url.partition(":")[0]
            assert raised.value.path == str(path)
    assert sorted(here.rglob("*")) == before


def test_the_plain_path_is_the_way_out_of_a_file_url(here):
    for url in ("file:///data/run", "file:/data/run", "file://localhost/data/run"):
        with pytest.raises(penstock.UnsupportedPathError, match="plain path, '/data/run'"):
            penstock.load(url)
    with pytest.raises(penstock.UnsupportedPathError, match="copy between"):
        penstock.load("file://elsewhere/data/run")


def test_bytes_are_looked_at_as_well(here):
    with pytest.raises(penstock.UnsupportedPathError):
        penstock.load(b"s3://bucket/run")


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
    *(
        ["diff", "ckpt", "URL"],
        ["doctor", "URL"],
        ["bench", "io", "URL"],
        ["demo", "--directory", "URL"],
    ),
    *(["bench", "io", "--output", "URL"], ["bench", "compare", "URL", "URL"]),
    *(["bench", "checkpoint", "URL"], ["trace", "summary", "URL"], ["trace", "merge", "URL", "a"]),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_takes_a_url(here, command):
    before = sorted(os.listdir())
    arguments = [word.replace("URL", "s3://bucket/run") for word in command]
    done = CliRunner().invoke(cli, arguments)
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
        except penstock.OptionsError as error:
            said.append(str(error))
        print(json.dumps([said, os.listdir()]))
        """
    )
    assert len(said[0]) == 1
    assert said[0][0].startswith(variable)
    assert "is a URL" in said[0][0]
    assert "s3:" not in said[1]


def test_dcp_leaves_urls_to_others():
    for url in (*URLS, pathlib.PurePosixPath("s3://b/k")):
        assert not StorageWriter.validate_checkpoint_id(url)
        assert not StorageReader.validate_checkpoint_id(url)
    with suppress(OSError):
        assert StorageReader.validate_checkpoint_id("runs/a:b")
