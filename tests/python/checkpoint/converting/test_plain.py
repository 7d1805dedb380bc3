"""A pickle of plain values is read in any protocol, by any NumPy; nothing else is called."""

from __future__ import annotations

import argparse
import collections
import os
import pickle
import re
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

import penstock
from archives import members, packed, saved
from compare import assert_same
from conftest import REPOSITORY
from penstock.errors import CorruptCheckpointError, StorageError, UnsupportedStateError

torch = pytest.importorskip("torch")

GOLDEN = REPOSITORY / "tests" / "golden" / "foreign"


def loaded(source, path, **arguments):
    report = penstock.convert(source, path, **arguments)
    assert penstock.verify(path).ok
    return penstock.load(path), report


def state_of():
    weight = torch.arange(6.0).view(2, 3)
    return {
        "model": OrderedDict(w=weight, tied=weight, half=torch.ones(3).bfloat16()),
        "array": np.arange(4, dtype=np.int16),
        "column": np.asfortranarray(np.eye(2)),
        "number": np.float32(2.5),
        "text": np.str_("sixteen"),
        "flag": np.bool_(True),
        "epoch": 2,
        "betas": (0.9, 0.99),
        "bytes": b"ab\xff",
        "size": torch.Size([2]),
    }


def more():
    return {
        "set": {1, 2},
        "frozen": frozenset({3}),
        "complex": 1 - 2j,
        "array": bytearray(b"xyz"),
        "long": 1 << 90,
        "text": "äöü",
        "device": torch.device("cuda:1"),
        "dtype": torch.float16,
        "numpy": np.dtype("<i2"),
        "random": np.random.get_state(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
        "strided": torch.arange(12.0).view(3, 4).t()[1:, ::2],
        "float8": torch.ones(2).to(torch.float8_e4m3fn),
        "nan": np.float64("nan"),
        "scalar": np.array(7),
    }


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_states_of_any_protocol_are_taken(tmp_path, protocol, is_zip):
    state = {**state_of(), "more": more()}
    saved(
        tmp_path / "a.pt",
        state,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=is_zip,
    )
    found, report = loaded(tmp_path / "a.pt", tmp_path / "a")
    state["more"]["parameter"] = state["more"]["parameter"].detach()
    assert_same(found, state)
    assert report.trusted == ()
    assert found["model"]["w"].data_ptr() == found["model"]["tied"].data_ptr()


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.pt")), ids=lambda file: file.name)
@pytest.mark.parametrize("trust", [True, False])
def test_files_of_older_and_newer_versions_are_taken(tmp_path, file, trust):
    found, report = loaded(file, tmp_path / "a", trust=trust)
    assert_same(found, state_of())
    assert report.trusted == ()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*-dcp")), ids=lambda path: path.name)
def test_directories_of_older_and_newer_versions_of_dcp_are_taken(tmp_path, path):
    found, report = loaded(path, tmp_path / "a")
    assert report.kind == "dcp"
    layers = [torch.ones(2), torch.zeros(1)]
    model = {"w": torch.arange(6.0).view(2, 3), "layers": layers}
    assert_same(found, {"model": model, "epoch": 2, "number": np.float32(2.5)})


@pytest.mark.parametrize("trust", [True, False])
@pytest.mark.parametrize("module", [b"numpy.core", b"numpy._core"])
def test_numbers_and_arrays_of_both_names_of_numpy_are_taken(tmp_path, module, trust):
    state = {"a": np.arange(3.0), "n": np.int64(5), "w": torch.ones(2)}
    if trust:
        state["other"] = argparse.Namespace(lr=np.float64(0.5))
    content = members(saved(tmp_path / "a.pt", state))
    name = next(one for one in content if one.endswith("data.pkl"))
    content[name] = re.sub(rb"numpy\._?core\.", module + b".", content[name])
    found, _ = loaded(packed(tmp_path / "b.pt", content), tmp_path / "b", trust=trust)
    assert_same(found["a"], state["a"])
    assert_same(found["n"], state["n"])


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [2, 5])
def test_what_is_not_plain_is_refused_by_all_of_its_names(tmp_path, protocol, is_zip):
    state = {"a": argparse.Namespace(x=1), "b": [collections.UserDict()], "w": torch.ones(2)}
    path = saved(
        tmp_path / "a.pt",
        state,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=is_zip,
    )
    with pytest.raises(UnsupportedStateError, match=r"trust=True \(--trust\)") as caught:
        penstock.convert(path, tmp_path / "a")
    for name in ("argparse.Namespace", "collections.UserDict"):
        assert name in str(caught.value)
    found, report = loaded(path, tmp_path / "a", trust=True)
    assert report.trusted == ("argparse.Namespace", "collections.UserDict")
    assert pickle.loads(found["a"]) == state["a"]


def hostile(root, program):
    """Writes an archive with a pickle program."""
    content = members(saved(root / "plain.pt", {"w": torch.ones(2)}))
    name = next(one for one in content if one.endswith("data.pkl"))
    return packed(root / "hostile.pt", {**content, name: program})


def called(module, name, argument):
    """Returns a pickle that calls a function."""
    return f"c{module}\n{name}\n".encode() + b"(" + argument + b"tR."


@pytest.mark.parametrize(
    "program",
    [
        called("os", "system", b"S'touch called'\n"),
        called("posix", "system", b"S'touch called'\n"),
        called("builtins", "eval", b'S\'open("called", "w")\'\n'),
        called("torch", "load", b"S'called'\n"),
        called("torch.serialization", "os.system", b"S'touch called'\n"),
        called("numpy.core.numeric", "fromfile", b"S'called'\n"),
        called("torch.storage", "_load_from_bytes", b"S'called'\n"),
    ],
)
@pytest.mark.parametrize("protocol", [b"", b"\x80\x02", b"\x80\x04"])
def test_nothing_but_plain_names_is_called(tmp_path, monkeypatch, program, protocol):
    monkeypatch.chdir(tmp_path)
    path = hostile(tmp_path, protocol + program)
    with pytest.raises(UnsupportedStateError, match="--trust"):
        penstock.convert(path, tmp_path / "a")
    assert not os.path.exists("called")


@pytest.mark.parametrize(
    "name",
    [
        "collections OrderedDict",
        "torch Tensor",
        "torch._utils _rebuild_tensor_v2",
        "numpy ndarray",
        "torch.nn.parameter Parameter",
        "argparse Namespace",
    ],
)
def test_what_a_name_stands_for_cannot_be_changed(tmp_path, name):
    """BUILD sets attributes of any object, also of classes and functions."""
    module, _, attribute = name.partition(" ")
    target = pickle.loads(f"c{module}\n{attribute}\n.".encode())
    for state in (b"(dS'changed'\nI1\ns", b"N(dS'changed'\nI1\ns\x86"):
        program = b"\x80\x02" + f"c{module}\n{attribute}\n".encode() + state + b"b."
        with pytest.raises(penstock.PenstockError):
            penstock.convert(hostile(tmp_path, program), tmp_path / "a")
        assert not hasattr(target, "changed")


def test_types_that_all_arrays_share_cannot_be_changed(tmp_path):
    """`numpy.dtype` returns one shared object for all arrays, and BUILD can set its state."""
    program = b"\x80\x02cnumpy\ndtype\n(S'i4'\nI00\nI00\ntR(I3\nS'>'\nNNNI-1\nI-1\nI0\ntb."
    penstock.convert(hostile(tmp_path, program), tmp_path / "a")
    assert np.dtype("i4").isnative
    assert np.arange(3, dtype="i4").tolist() == [0, 1, 2]


def test_a_tensor_cannot_reach_beyond_its_storage(tmp_path):
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        content = members(saved(tmp_path / "a.pt", {"w": torch.ones(4)}))
        name = next(one for one in content if one.endswith("data.pkl"))
        # Changes the tensor's shape, one byte after the opcode of a small number.
        program = content[name].replace(b"K\x04\x85", b"K\x40\x85")
        assert program != content[name]
        packed(tmp_path / "b.pt", {**content, name: program}, compression)
        with pytest.raises(penstock.PenstockError):
            penstock.convert(tmp_path / "b.pt", tmp_path / "b", trust=True)
        assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_is_cut_is_damaged_whether_it_is_trusted(tmp_path, is_zip):
    path = saved(
        tmp_path / "a.pt",
        {"w": torch.ones(3), "a": argparse.Namespace()},
        _use_new_zipfile_serialization=is_zip,
    )
    if is_zip:
        content = members(path)
        name = next(one for one in content if one.endswith("data.pkl"))
        packed(path, {**content, name: content[name][:-20]})
    else:
        os.truncate(path, path.stat().st_size - 20)
    for trust in (True, False):
        with pytest.raises(CorruptCheckpointError, match=r"a\.pt is cut"):
            penstock.convert(path, tmp_path / "a", trust=trust)


def test_a_pickle_that_torch_save_did_not_write_is_named(tmp_path):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"a": np.ones(3)}))
    with pytest.raises(UnsupportedStateError, match=r"a pickle and not by torch\.save"):
        penstock.convert(tmp_path / "a.pkl", tmp_path / "a")


def test_classes_that_fail_are_not_called_damage(tmp_path):
    path = saved(tmp_path / "a.pt", {"a": Failing()})
    with pytest.raises(UnsupportedStateError, match="not with this version"):
        penstock.convert(path, tmp_path / "a", trust=True)


class Failing:
    """A class whose newer version no longer accepts its state."""

    def __setstate__(self, state):
        raise ValueError("not with this version")

    def __getstate__(self):
        return {"a": 1}


def test_sparse_tensors_are_checked(tmp_path):
    """The indices of sparse tensors are data, and address memory."""
    for layout in (torch.sparse_coo, torch.sparse_csr):
        sparse = torch.eye(3).to_sparse(layout=layout)
        content = members(saved(tmp_path / "a.pt", {"s": sparse}))
        stored = sorted(name for name in content if "/data/" in name)
        wrong = {name: b"\x7f" * len(content[name]) for name in stored[:1]}
        packed(tmp_path / "b.pt", {**content, **wrong})
        with pytest.raises(UnsupportedStateError):
            penstock.convert(tmp_path / "b.pt", tmp_path / "b", trust=True)


MADE_BY_NOBODY = {
    "a text of another encoding": called("_codecs", "encode", b"S'a'\nS'idna'\n"),
    "a set of a list": called("builtins", "set", b"(l(la"),
    "a parameter of a number": called("torch.nn.parameter", "Parameter", b"I5\n"),
    "a device that is none": called("torch", "device", b"S'nonsense'\n"),
    "more zeros than memory": called("builtins", "bytearray", b"I10000000000000\n"),
    "an array without its values": called("numpy", "ndarray", b"(I3\nt"),
    "more of it than memory": called("numpy", "ndarray", b"(I10000000000000\nt"),
    "a tensor without its values": called("torch", "Tensor", b"I5\n"),
    "an array that no state follows": called(
        "numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\n(I4\ntS'd'\n"
    ),
}


@pytest.mark.parametrize("program", MADE_BY_NOBODY.values(), ids=MADE_BY_NOBODY)
@pytest.mark.parametrize("trust", [True, False])
def test_plain_names_in_a_pickle_that_nobody_writes_are_no_matter_of_trust(
    tmp_path, program, trust
):
    """Nor may uninitialized memory, left by a call, be stored as values."""
    path = hostile(tmp_path, b"\x80\x02" + program)
    with pytest.raises(UnsupportedStateError, match="pass its state to penstock") as found:
        penstock.convert(path, tmp_path / "a", trust=trust)
    assert "trust" not in str(found.value)


@pytest.mark.parametrize("trust", [True, False])
def test_a_value_that_memory_does_not_hold_is_an_error_with_a_name(tmp_path, trust):
    size = (10**13).to_bytes(8, "little")
    programs = [b"\x80\x05\x96" + size + b"."]
    if trust:
        # A trusted pickle calls the name itself.
        other = b"cargparse\nNamespace\n0"
        programs.append(b"\x80\x02" + other + called("builtins", "bytearray", b"I10000000000000\n"))
    for program in programs:
        with pytest.raises(StorageError, match="no memory for a value in its pickle"):
            penstock.convert(hostile(tmp_path, program), tmp_path / "a", trust=trust)


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("protocol", [0, 1])
def test_protocols_0_and_1_are_taken_or_refused_by_name(tmp_path, protocol, is_zip):
    """PyTorch itself reads no tensors of protocol 0."""
    path = saved(
        tmp_path / "a.pt",
        state_of(),
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=is_zip,
    )
    if protocol == 0:
        with pytest.raises(UnsupportedStateError, match="pickle_protocol=0"):
            penstock.convert(path, tmp_path / "a")
        path = saved(path, {"n": 1}, pickle_protocol=0, _use_new_zipfile_serialization=is_zip)
        assert loaded(path, tmp_path / "a")[0] == {"n": 1}
        return
    assert_same(loaded(path, tmp_path / "a")[0], state_of())


def test_sparse_tensors_out_of_order_are_refused_by_that(tmp_path):
    indices = torch.tensor([0, 2, 2]), torch.tensor([1, 0])
    rows = torch.sparse_csr_tensor(*indices, torch.ones(2), (2, 2))
    path = saved(tmp_path / "a.pt", {"s": rows})
    for trust in (True, False):
        with pytest.raises(UnsupportedStateError, match="not sorted and distinct"):
            penstock.convert(path, tmp_path / "a", trust=trust)
