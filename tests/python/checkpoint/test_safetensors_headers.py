"""Headers of safetensors files: all readers follow the rules of the safetensors library."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import penstock
from compare import tensor_bytes
from headers import BITS, FLOAT6, POINTER, entry, write
from penstock import features, offload
from penstock.checkpoint.converting.files.safetensors_file import read_safetensors
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PenstockWarning,
    UnsupportedStateError,
)
from penstock.io.files.extents import TensorExtent
from penstock.io.files.safetensors_files import read_header
from penstock.io.files.safetensors_header import weights_of

if TYPE_CHECKING:
    from collections.abc import Callable

INDEX = "model.safetensors.index.json"
DATA = bytes(range(1, 65))


def of_library(path: Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of a file by the library."""
    with safe_open(path, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def imported(path: Path) -> dict[str, torch.Tensor]:
    to = path.parent.parent / "imported"
    penstock.import_model(path.parent, to, overwrite=True)
    assert penstock.verify(to).ok
    found: dict[str, torch.Tensor] = penstock.load(to)["model"]
    return found


def exported(path: Path) -> dict[str, torch.Tensor]:
    imported(path)
    out = path.parent.parent / "exported"
    penstock.export(path.parent.parent / "imported", out, hard_link=True, check=False)
    return of_library(out / "model.safetensors")


def converted(path: Path) -> dict[str, torch.Tensor]:
    return read_safetensors(os.fspath(path))


def gathered(path: Path) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in of_library(path).items():
        with features.open(path, name) as table:
            found[name] = table.gather(torch.arange(len(table))).view(tensor.shape)
    return found


def streamed(path: Path) -> dict[str, torch.Tensor]:
    """Finds weights as `penstock.offload.stream` does: by their byte ranges."""
    found = {}
    for name, stored in weights_of(os.fspath(path.parent)).tensors.items():
        assert isinstance(stored, TensorExtent)
        (run,) = stored.runs
        data = path.read_bytes()[run.offset : run.offset + run.nbytes]
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found[name] = values.view(stored.dtype).view(stored.shape)
    return found


READERS: list[Callable[[Path], dict[str, torch.Tensor]]] = [
    imported,
    exported,
    converted,
    gathered,
    streamed,
]

PLAIN = json.dumps({"a": entry("F32", [4, 4], 0, 64)})
GOOD = {
    "blanks before the header": " \t\r\n" + PLAIN,
    "blanks after it": PLAIN + "   \n",
    "no metadata": PLAIN.replace('{"a"', '{"__metadata__": null, "a"'),
    "a further member of a tensor": json.dumps({"a": entry("F32", [4, 4], 0, 64, note=[{}])}),
    **{
        f"elements of {kind}": json.dumps({"a": entry(kind, [4, 64 * 2 // bits], 0, 64)})
        for kind, bits in BITS.items()
        if kind not in FLOAT6
    },
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "hf").mkdir()
    return tmp_path / "hf" / "model.safetensors"


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
@pytest.mark.parametrize("header", list(GOOD.values()), ids=list(GOOD))
def test_what_the_library_reads_every_reader_reads(
    model: Path, reader: Callable[[Path], dict[str, torch.Tensor]], header: str
) -> None:
    data = bytes(at % 2 for at in range(64)) if "BOOL" in header else DATA
    write(model, header, data)
    expected = of_library(model)
    found = reader(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert tensor_bytes(found[name]) == tensor_bytes(tensor)


NEWER = {
    **{kind: json.dumps({"a": entry(kind, [4], 0, 3)}) for kind in FLOAT6},
    "a type of a newer library": json.dumps({"a": entry("F99", [3], 0, 3)}),
    "rows that end within a byte": json.dumps({"a": entry("F4", [2, 3], 0, 3)}),
    "a name twice": '{"a": %s, "a": %s}' % ((json.dumps(entry("U8", [3], 0, 3)),) * 2),
    "a size that no tensor has": json.dumps(
        {"a": entry("U8", [0, 1 << 63], 0, 0), "b": entry("U8", [3], 0, 3)}
    ),
    "a type that is an object": json.dumps({"a": entry({"U8": None}, [3], 0, 3)}),
}
REFUSING: list[Callable[[Path], Any]] = [
    imported,
    converted,
    streamed,
    lambda path: features.open(path, "a"),
    lambda path: offload.stream(torch.nn.Linear(1, 1), memory_bytes=1 << 20, weights=path.parent),
]


@pytest.mark.parametrize("reader", REFUSING)
@pytest.mark.parametrize("header", list(NEWER.values()), ids=list(NEWER))
def test_what_no_tensor_holds_is_named_and_not_called_damaged(
    model: Path, reader: Callable[[Path], Any], header: str
) -> None:
    write(model, header, bytes(3))
    with pytest.raises(UnsupportedStateError, match=r"model\.safetensors.*\"a\"|'a'") as e:
        reader(model)
    assert e.value.key == "a"
    assert not (model.parent.parent / "imported").exists()


BROKEN = {
    "bytes that no tensor has": json.dumps({"a": entry("F32", [4, 3], 0, 48)}),
    "half a byte": json.dumps({"a": entry("F4", [127], 0, 64)}),
    "a number that JSON cannot have": PLAIN.replace('{"dtype"', '{"x": NaN, "dtype"'),
    "half a character": PLAIN.replace('{"dtype"', '{"x": "\\ud800", "dtype"'),
    "metadata twice": PLAIN.replace('{"a"', '{"__metadata__": {}, "__metadata__": {}, "a"'),
    "metadata that is no text": PLAIN.replace('{"a"', '{"__metadata__": {"a": 1}, "a"'),
    "a mark before the text": "\ufeff" + PLAIN,
    "another size": json.dumps({"a": entry("F32", [4, 5], 0, 64)}),
}


@pytest.mark.parametrize("reader", REFUSING)
@pytest.mark.parametrize("header", list(BROKEN.values()), ids=list(BROKEN))
def test_what_the_library_refuses_every_reader_calls_damaged(
    model: Path, reader: Callable[[Path], Any], header: str
) -> None:
    write(model, header, DATA)
    with pytest.raises(safetensors.SafetensorError):
        of_library(model)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors") as caught:
        reader(model)
    assert caught.value.file == "model.safetensors"


def test_the_tensor_that_is_wrong_is_named(model: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.ones(4)}, model)
    text = model.read_bytes().replace(b'"shape":[4]', b'"shape":[5]')
    model.write_bytes(text)
    with pytest.raises(CorruptCheckpointError, match=r"\"b\" has 16 bytes") as caught:
        imported(model)
    assert (caught.value.tensor, caught.value.path) == ("b", os.fspath(model.parent))


# ---- Pointers of Git LFS


def of_pointer(path: Path) -> str:
    path.write_bytes(POINTER)
    return os.fspath(path)


@pytest.mark.parametrize(
    "reader",
    [
        *REFUSING,
        lambda path: features.open(of_pointer(path.with_name("a.npy"))),
        lambda path: features.open(of_pointer(path.with_name("a")), shape=(None,), dtype="int8"),
        lambda path: features.open(path.parent, "a"),
        lambda path: penstock.load(path),
        lambda path: penstock.convert(path, path.parent / "new"),
        lambda path: penstock.convert(of_pointer(path.with_name("a.pt")), path.parent / "new"),
        lambda path: (of_pointer(path.with_name(INDEX)), imported(path)),
        lambda path: (of_pointer(path.with_name(INDEX)), features.open(path.parent, "a")),
    ],
)
def test_a_pointer_of_git_lfs_is_named_with_the_way_out(
    model: Path, reader: Callable[[Path], Any]
) -> None:
    of_pointer(model)
    with pytest.raises(CheckpointNotFoundError, match=r"Git LFS.*`git lfs pull`"):
        reader(model)


@pytest.mark.parametrize("file", ["manifest.json", "part-*", "shard-*"])
def test_a_checkpoint_of_which_a_file_is_a_pointer_says_so(tmp_path: Path, file: str) -> None:
    store = penstock.CheckpointStore(tmp_path)
    store.save(1, {"w": torch.ones(3000)})
    path = Path(store.path(1))
    (found,) = path.glob(file)
    found.write_bytes(POINTER)
    for reader in (penstock.load, penstock.inspect, lambda path: features.open(path, key="w")):
        with pytest.raises(CorruptCheckpointError, match=r"Git LFS.*`git lfs pull`"):
            reader(path)
    with (
        pytest.warns(PenstockWarning, match=r"Git LFS.*`git lfs pull`"),
        pytest.raises(CheckpointNotFoundError, match="damaged"),
    ):
        store.load()
    assert "`git lfs pull`" in penstock.verify(path).problems[0].message


@pytest.mark.parametrize("file", ["table.json", "rows-0", "log-0"])
def test_a_table_of_which_a_file_is_a_pointer_says_so(tmp_path: Path, file: str) -> None:
    with features.Table.create(tmp_path / "table", 10, {"x": (4, "float32")}) as table:
        table.update([1], {"x": torch.ones(1, 4)})
    (tmp_path / "table" / file).write_bytes(POINTER)
    with pytest.raises(CheckpointNotFoundError, match=r"Git LFS.*`git lfs pull`"):
        features.Table(tmp_path / "table")


# ---- Drawn headers


@st.composite
def headers(draw: st.DrawFn) -> tuple[str, int]:
    """Draws a nearly valid header, and the number of bytes after it."""
    tensors: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.sampled_from(["a", "b", "", "\u00e9", "x.y"]), max_size=4)):
        kind = draw(st.sampled_from([*BITS, "F99", "f32"]))
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        nbytes = int(np.prod(shape, dtype=int)) * BITS.get(kind, 8) // 8
        tensors[name] = entry(kind, shape, at, at + nbytes)
        at += nbytes
    text = json.dumps(tensors)
    old, new = draw(
        st.sampled_from(
            [
                ("", ""),
                ("{", " \n{"),
                ('"dtype"', '"x": [1, {"y": 1e400}], "dtype"'),
                ('"dtype"', '"x": [1, {"y": null}], "dtype"'),
                ("[0, ", "[-0, "),
                ("[0, ", "[0.0, "),
                ("[0, ", "[1, "),
                ('"dtype"', '"shape": [], "dtype"'),
                ('{"a"', '{"__metadata__": null, "a"'),
                ('{"a"', '{"__metadata__": {"a": "\\u0000"}, "a"'),
                ('{"a"', '{"__metadata__": {"a": null}, "a"'),
                ("}}", "}} "),
                ("}}", "}}}"),
                ("}}", "},}"),
            ]
        )
    )
    text = text.replace(old, new, draw(st.integers(0, 2))) if old else text
    return text, at + draw(st.sampled_from([0, 0, 0, 0, 1, -1]))


@settings(max_examples=300, deadline=None)
@given(made=headers())
def test_the_parser_agrees_with_the_library(
    made: tuple[str, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "one.safetensors"
    write(path, made[0], bytes(max(made[1], 0)))
    try:
        theirs = {
            name: (one["dtype"], list(one["shape"]), bytes(one["data"]))
            for name, one in safetensors.deserialize(path.read_bytes())
        }
    except safetensors.SafetensorError:
        theirs = None
    with path.open("rb") as file:
        try:
            ours = read_header(file, os.fspath(path)).tensors
        except CorruptCheckpointError:
            ours = None
    if ours is not None and any(one.kind not in BITS for one in ours.values()):
        # Only a newer library knows the type.
        assert theirs is None
        return
    assert (ours is None) == (theirs is None)
    for name, one in (ours or {}).items():
        kind, shape, data = (theirs or {})[name]
        assert path.read_bytes()[one.begin : one.end] == data
        assert one.kind == kind
        if one.dtype is not None and kind != "F4":
            assert list(one.shape) == shape
