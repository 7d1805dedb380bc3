"""Checkpoints with right digests and senseless contents: each reader raises a Penstock error."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from forge import Forgery
from offload.optim.training_of import MEMORY_BYTES, SMALL, parameters, set_gradients
from penstock import offload
from penstock.cli import cli
from penstock.integrations import dcp

if TYPE_CHECKING:
    from collections.abc import Callable

DEEP = 50_000
TREES = {
    "deep list": "[" * DEEP + "]" * DEEP,
    "deep object": '{"a":' * DEEP + "1" + "}" * DEEP,
    "no such tensor": '{"w":{"$":"tensor","i":7}}',
    "a key twice": '{"w":1,"w":2}',
    "not a number": '{"w":{"$":"float","v":[]}}',
}
NOTES = {
    "deep": '{"a":' * DEEP + "1" + "}" * DEEP,
    "list": "[1]",
    "number": "5",
}


def _cli(*arguments: str) -> None:
    result = CliRunner().invoke(cli, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code:
        raise penstock.PenstockError(result.output)


def _table(path: Path) -> None:
    with penstock.features.open(path, "w") as table:
        table.gather([0])


def _resume(path: Path) -> None:
    with penstock.CheckpointStore(path.parent) as store:
        store.resume(penstock.Training(model=torch.nn.Linear(3, 2)))


def _retain(path: Path) -> None:
    with penstock.CheckpointStore(path.parent) as store:
        store.save(9, {"w": torch.ones(2, 3)})
    keep: Callable[[int, dict[str, Any]], bool] = lambda _, note: bool(note.get("best"))  # noqa: E731
    with penstock.CheckpointStore(path.parent, keep_last=1, keep=keep) as store:
        store.retain()


def _stream(path: Path) -> None:
    offload.stream(torch.nn.Sequential(torch.nn.Linear(3, 2)), weights=path, memory_bytes=1 << 20)


def _dcp(path: Path) -> None:
    state, reader = {"w": torch.zeros(2, 3)}, dcp.StorageReader(path)
    try:
        torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    except torch.distributed.checkpoint.api.CheckpointException as error:
        # DCP combines the errors of all ranks into one.
        if "version of Penstock" not in str(error):
            raise


READERS: dict[str, Callable[[Path], object]] = {
    "load": penstock.load,
    "load keys": lambda path: penstock.load(path, keys="w"),
    "load into": lambda path: penstock.load(path, into={"w": torch.zeros(2, 3)}),
    "inspect": penstock.inspect,
    "verify": penstock.verify,
    "explain": lambda path: penstock.explain(path),
    "export": lambda path: penstock.export(path, path.parent / "out"),
    "features": _table,
    "resume": _resume,
    "retain": _retain,
    "stream": _stream,
    "dcp": _dcp,
    "cli inspect": lambda path: _cli("inspect", str(path)),
    "cli ls": lambda path: _cli("ls", str(path.parent)),
    "cli diff": lambda path: _cli("diff", str(path), str(path)),
    "cli export": lambda path: _cli("export", str(path), str(path.parent / "out")),
    "salvage": lambda path: penstock.salvage(path, path.parent / "salvaged"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "step-0000000001"
    with penstock.CheckpointStore(path.parent) as store:
        store.save(1, {"w": torch.arange(6.0).view(2, 3)})
    return path


def copied(saved: Path, directory: Path) -> Path:
    path = directory / saved.name
    shutil.copytree(saved, path)
    return path


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.parametrize("what", list(TREES))
def test_a_tree_that_lies_is_an_error_of_penstock(
    saved: Path, tmp_path: Path, what: str, reader: str
) -> None:
    path = copied(saved, tmp_path)
    Forgery(path).write_tree(TREES[what])
    _read(reader, path)


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.parametrize("what", list(NOTES))
def test_metadata_that_lies_is_an_error_of_penstock(
    saved: Path, tmp_path: Path, what: str, reader: str
) -> None:
    path = copied(saved, tmp_path)
    forgery = Forgery(path)
    members = {key: value for key, value in forgery.manifest.items() if key != "digest"}
    members["metadata"] = 123454321
    text = json.dumps(members, separators=(",", ":")).replace("123454321", NOTES[what])
    forgery.write_manifest_text(text[:-1].encode())
    _read(reader, path)


def _read(reader: str, path: Path) -> None:
    """Reads; accepts only a short Penstock error that names the path."""
    try:
        READERS[reader](path)
    except penstock.PenstockError as error:
        message = str(error)
    else:
        message = ""
    assert len(message) < 2_000


STEPS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=3), some),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def generation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("generation")
    ours = parameters(shapes=SMALL)
    one = offload.AdamW(ours, directory=directory, memory_bytes=MEMORY_BYTES)
    set_gradients(0, ours)
    one.step()
    one.close()
    return directory


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS, whole=st.booleans())
def test_counts_that_lie_are_an_error_of_recover(generation: Path, steps: Any, whole: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = shutil.copytree(generation, Path(directory) / "state")
        forgery = Forgery(path / "rank-00000" / "generation")
        note = forgery.manifest["metadata"]
        note["steps"] = steps if whole else {**note["steps"], "1": steps}
        forgery.write_manifest()
        one = offload.AdamW(parameters(shapes=SMALL), directory=path, memory_bytes=MEMORY_BYTES)
        message = ""
        try:
            one.recover()
        except penstock.PenstockError as error:
            message = str(error)
        counts = [float(some["step"]) for some in one.state_dict()["state"].values()]
        one.close()
    assert str(path) in message if message else np.isfinite(counts).all()
