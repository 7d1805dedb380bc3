"""Errors: their classes and facts, refused states, and forged trees."""

import contextlib
import copy
import dataclasses
import datetime as dt
import enum
import errno
import inspect
import json
import pathlib
import pickle
import random
import re
import typing
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import penstock
from penstock import _native, errors, metrics
from penstock.checkpoint.state.flatten import flatten
from penstock.checkpoint.state.tree import references, scalars, tree
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitUndecidedError,
    CorruptCheckpointError,
    FormatVersionError,
    MissingDependencyError,
    OptionsError,
    PenstockWarning,
    StateMismatchError,
    StorageError,
    UnsupportedPathError,
    UnsupportedStateError,
)

REFUSALS = (
    CorruptCheckpointError,
    StateMismatchError,
    FormatVersionError,
    MissingDependencyError,
)

SAMPLES = {str: "text", int: 7, bool: True, tuple: ("a", "b")}
"""A value for each type of an error's facts; optional facts may be None instead."""


def kinds(base=penstock.PenstockError):
    """Yields the errors of the public API; other modules have subclasses of their own."""
    if base.__module__ == "penstock.errors":
        yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def parameters(kind):
    found = inspect.signature(kind.__init__).parameters.values()
    return [one for one in found if one.kind is one.KEYWORD_ONLY]


def instances():
    """Yields every error with its required facts, and with all facts."""
    for kind in kinds():
        hints = typing.get_type_hints(kind.__init__)
        samples = {}
        for one in parameters(kind):
            options = typing.get_args(hints[one.name]) or (hints[one.name],)
            form = typing.get_origin(hints[one.name]) or options[0]
            samples[one.name] = SAMPLES[form if form in SAMPLES else options[0]]
        yield kind("m", **samples)
        given = {
            one.name: samples[one.name] for one in parameters(kind) if one.default is one.empty
        }
        if given != samples:
            yield kind("m", **given)


INSTANCES = list(instances())


def test_errors_have_the_facts_that_they_are_made_of():
    for kind in kinds():
        assert kind._fields == tuple(one.name for one in parameters(kind))
        # Otherwise ranks could not exchange it, and no metric would count it.
        assert errors.called(kind.__name__) is kind
        assert kind._result in {*metrics._SAVE_RESULTS, *metrics._LOAD_RESULTS}


@pytest.mark.parametrize("error", INSTANCES, ids=lambda error: type(error).__name__)
def test_an_error_is_its_message_and_survives_a_process_boundary(error):
    error.add_note("a note")
    for again in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(again, penstock.PenstockError)
        assert type(again) is type(error)
        assert str(again) == "m"
        assert again.args == ("m",)
        assert again.__notes__ == ["a note"]
        for name in type(error)._fields:
            assert getattr(again, name) == getattr(error, name)


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (CheckpointNotFoundError, FileNotFoundError),
        (CheckpointExistsError, FileExistsError),
        (CorruptCheckpointError, ValueError),
        (FormatVersionError, ValueError),
        (UnsupportedPathError, ValueError),
        (UnsupportedStateError, TypeError),
        (StateMismatchError, ValueError),
        (StorageError, OSError),
        (CommitUndecidedError, StorageError),
        (MissingDependencyError, ImportError),
        (OptionsError, ValueError),
        (PenstockWarning, UserWarning),
    ],
)
def test_errors_are_the_builtin_ones_too(error, base):
    assert issubclass(error, base)


def test_system_errors_carry_errno_and_filename():
    error = errors.StorageError("no space", path="/a/b", errno=errno.ENOSPC)
    assert (error.errno, error.filename) == (errno.ENOSPC, "/a/b")
    missing = errors.CheckpointNotFoundError("nothing", path="/a")
    assert (missing.errno, missing.filename) == (errno.ENOENT, "/a")


# Refused states.


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


class Dictionary(dict):
    pass


class Tensor(torch.Tensor):
    pass


@dataclasses.dataclass
class Point:
    x: int


Pair = namedtuple("Pair", "a b")


class Queue(deque):
    pass


class Route(pathlib.PurePosixPath):
    pass


class Moment(dt.datetime):
    pass


def quantized():
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: Colour.RED, r"\.value or \.name"),
        (lambda: Text("x"), "save str"),
        (lambda: Dictionary(), "save dict"),
        (lambda: UserDict(), "save dict"),
        (lambda: Pair(1, 2), "register_type"),
        (lambda: Queue([1]), "save collections.deque"),
        (lambda: iter([1]), "save list"),
        (lambda: Point(1), "save its fields"),
        (lambda: object(), "save its fields"),
        (lambda: len, "code is never stored"),
        (lambda: quantized, "code is never stored"),
        (lambda: int, "code is never stored"),
        (lambda: pathlib, "code is never stored"),
        (lambda: Route("x"), "save str"),
        (lambda: Moment(2026, 1, 1), "isoformat"),
        (lambda: random.Random(1), "getstate"),
        (lambda: np.random.default_rng(1), "bit_generator"),
        (lambda: torch.Generator(), "get_state"),
        (lambda: torch.nn.Linear(1, 1), "state_dict"),
        (lambda: defaultdict(lambda: 0), "factory"),
        (lambda: slice("a"), "slices of ints"),
        (lambda: {torch.ones(1)}, "list"),
        (lambda: {1: {b"key": 1}}, "use str"),
        (lambda: np.array([object()]), "Python objects"),
        (lambda: np.zeros(1, [("a", "f4")]), "fields"),
        (lambda: np.zeros(1, [("a", "f4")])[0], "fields"),
        (lambda: np.ma.zeros(1), "np.asarray"),
        (lambda: np.matrix([1]), "np.asarray"),
        (lambda: np.empty(2, "V0"), "astype"),
        (lambda: Tensor([1.0]), "plain torch.Tensor"),
        (lambda: torch.ones(2, device="meta"), "to_empty"),
        (lambda: quantized(), "int_repr"),
        (lambda: torch.ones(2).to_mkldnn(), "plain strided tensor"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "plain torch.Tensor"),
        (lambda: torch._efficientzerotensor(3), "freed or resized"),
    ],
)
def test_what_would_come_back_changed_is_refused_by_name(make, remedy, tmp_path):
    value = make()
    path = tmp_path / "ckpt"
    with pytest.raises(UnsupportedStateError, match=remedy) as caught:
        penstock.save(path, {"outer": [0, {"leaf": value}]})
    assert caught.value.key.startswith("outer.1.leaf")
    assert caught.value.key in str(caught.value)
    assert not path.exists()


def test_cycles_are_named():
    state = {"a": [1]}
    state["a"].append((state,))
    with pytest.raises(UnsupportedStateError, match=r"^a\.1\.0: .* contains itself"):
        flatten(state)


def test_a_container_may_occur_twice():
    inner = [1]
    assert flatten([inner, inner]).tree == "[[1],[1]]"


def test_attributes_of_a_dictionary_are_not_dropped():
    state = OrderedDict()
    state.colour = "red"
    with pytest.raises(UnsupportedStateError, match="'colour'"):
        flatten({"d": state})


@pytest.mark.parametrize(
    "metadata", [{"a": (1,)}, {1: 2}, {"a": float("nan")}, {"a": {1}}, {"a": 1 << 70}, {"a": b""}]
)
def test_metadata_that_would_change_is_refused(tmp_path, metadata):
    with pytest.raises(UnsupportedStateError, match="metadata"):
        penstock.save(tmp_path / "ckpt", {}, metadata=metadata)


# Forged trees. The native module stores any JSON as a tree, so these are whole, valid files.


def save_tree(path, text, tensors=(), aliases=()):
    _native.save(
        str(path),
        list(tensors),
        list(aliases),
        text,
        step=None,
        metadata="{}",
        overwrite=True,
        options=penstock.Options().to_native(),
        progress=None,
    )


def sources():
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = np.arange(20, dtype=np.uint8)
    return [
        ("m", "float32", (2, 3), matrix.ctypes.data, None, 4, matrix, None, None),
        ("t", "numpy:<U5", (1,), raw.ctypes.data, None, 20, raw, None, None),
        ("odd", "numpy:O", (1,), raw.ctypes.data, None, 20, raw, None, None),
        ("long", "numpy:<U9", (1,), raw.ctypes.data, None, 20, raw, None, None),
        ("b", "uint8", (20,), raw.ctypes.data, None, 1, raw, None, None),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"$":null}',
        '{"$":["tuple"],"v":[]}',
        '{"$":{}}',
        '{"$":"tuple"}',
        '{"$":"tuple","v":{}}',
        '{"$":"int","v":"12"}',
        '{"$":"int","v":"0x"}',
        '{"$":"int","v":"__import__"}',
        '{"$":"int","v":7}',
        '{"$":"float","v":"infinity"}',
        '{"$":"float","v":"0x12"}',
        '{"$":"str","v":"gICA"}',
        '{"$":"str","v":"%"}',
        '{"$":"bytes","v":"a"}',
        '{"$":"bytes"}',
        '{"$":"complex","v":[1.0]}',
        '{"$":"complex","v":[1,2]}',
        '{"$":"complex","v":[1.0,{"$":"complex","v":[1.0,1.0]}]}',
        '{"$":"set","v":[1,1]}',
        '{"$":"set","v":[[1]]}',
        '{"$":"set","v":[{"$":"ndarray","i":0}]}',
        '{"$":"dict","v":[[1,2],[1,3]]}',
        '{"$":"dict","v":[[1]]}',
        '{"$":"dict","v":[1]}',
        '{"$":"dict","v":[[[1],2]]}',
        '{"$":"dict","v":[[{"a":1},2]]}',
        '{"$":"dict","v":[[{"$":"tensor","i":0},2]]}',
        '{"$":"odict","v":[],"attrs":[]}',
        '{"$":"defaultdict","v":[]}',
        '{"$":"size","v":[1.5]}',
        '{"$":"device","v":"../x"}',
        '{"$":"np","dtype":"<f4","v":"AAA="}',
        '{"$":"slice","v":[1,2]}',
        '{"$":"slice","v":["a",null,null]}',
        '{"$":"range","v":[1,2,0]}',
        '{"$":"range","v":[1,2]}',
        '{"$":"tensor","i":5}',
        '{"$":"tensor","i":-1}',
        '{"$":"tensor","i":true}',
        '{"$":"tensor","i":0.0}',
        '{"$":"tensor"}',
        '{"$":"tensor","a":9}',
        '{"$":"tensor","v":0}',
        '{"$":"tensor","i":1}',
        '{"$":"ndarray","i":3}',
        '{"$":"bytes","i":0}',
        '{"$":"bytearray","i":1}',
        '{"$":"tensor","a":1}',
        "9" * 5000,
        "[" * 129 + "]" * 129,
        "[" * 100_000 + "]" * 100_000,
        '{"$":"tuple","v":[' * 300 + "]}" * 300,
        '{"a":' * 3000 + "1" + "}" * 3000,
    ],
    ids=lambda text: text[:60],
)
def test_a_tree_that_lies_is_corruption(tmp_path, text):
    path = tmp_path / "ckpt"
    negative = ("back", 0, ((2,), (-1,), 3))
    save_tree(path, text, sources(), [("same", 0, None), negative])
    for load in (
        penstock.load,
        lambda path: penstock.load(path, keys="*"),
        lambda path: penstock.load(path, into=[]),
    ):
        with pytest.raises((CorruptCheckpointError, StateMismatchError)) as caught:
            load(path)
        if load is penstock.load:
            assert type(caught.value) is CorruptCheckpointError
            assert caught.value.path == str(path)
            assert caught.value.file.startswith("part-")
            assert caught.value.file in str(caught.value)


def unknown_to_this_version():
    """Returns trees that another Penstock, PyTorch or NumPy may know, and their errors."""
    newer, lacking = FormatVersionError, MissingDependencyError
    return {
        '{"$":"pickle","v":"gASVAAAA"}': newer,
        '{"$":"eval","v":"1"}': newer,
        '{"$":"odict","v":[],"attrs":{"__class__":1}}': newer,
        '{"$":"defaultdict","factory":"eval","v":[]}': newer,
        '{"$":"dtype","v":"load"}': lacking,
        '{"$":"dtype","v":"float1"}': lacking,
        '{"$":"device","v":"frobnicator:0"}': lacking,
        '{"$":"np.dtype","v":"O"}': newer,
        '{"$":"np.dtype","v":"f4,f4"}': newer,
        '{"$":"np.dtype","v":"<f3"}': lacking,
        '{"$":"np","dtype":"|O","v":"AAAAAAAAAAA="}': newer,
        '{"$":"ndarray","i":2}': newer,
    }


@pytest.mark.parametrize(("text", "expected"), unknown_to_this_version().items())
def test_what_another_version_may_know_is_named_as_that(tmp_path, text, expected):
    path = tmp_path / "ckpt"
    save_tree(path, text, sources())
    for arguments in ({}, {"keys": "*"}):
        with pytest.raises(expected, match=re.escape(str(path))) as caught:
            penstock.load(path, **arguments)
        assert type(caught.value) is expected
    if expected is FormatVersionError:
        assert caught.value.found == caught.value.supported == _native.FORMAT_VERSION


tags = st.sampled_from(
    sorted(
        {
            *scalars._DECODERS,
            *references.DATA_TAGS,
            *tree.SEQUENCES,
            *tree.MAPPINGS,
            "set",
            "unknown",
        }
    )
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.fixed_dictionaries(
            {"$": tags | inner},
            optional=dict.fromkeys(("v", "i", "a", "dtype", "factory", "attrs"), inner),
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(json_values)
def test_any_tree_loads_or_is_corruption(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "any-tree"
    save_tree(path, json.dumps(value).replace("NaN", "0").replace("Infinity", "1"), sources())
    for arguments in ({}, {"keys": "*"}, {"into": {"a": 0}}):
        with contextlib.suppress(*REFUSALS):
            penstock.load(path, **arguments)
    with contextlib.suppress(*REFUSALS):
        penstock.inspect(path).values()


# A store with damaged steps.


@pytest.fixture
def store(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (10, 20, 30):
        store.save(step, {"w": np.full(5000, step), "step": step})
    return store


def shard(store, step):
    return next(pathlib.Path(store.path(step)).glob("shard-*"))


def test_unfinished_steps_are_passed_over(store):
    (pathlib.Path(store.path(30)) / "manifest.json").unlink()
    with pytest.warns(PenstockWarning, match="step 30 was never finished"):
        assert store.load()["step"] == 20
    assert (store.steps(), store.latest()) == ([10, 20], 20)
    assert [info.state for info in store.scan()] == ["complete", "complete", "incomplete"]


def test_damaged_steps_are_passed_over_with_a_warning(store):
    shard(store, 30).unlink()
    with pytest.warns(PenstockWarning, match="step-0000000030 is damaged") as caught:
        assert store.load()["step"] == 20
    assert caught[0].filename == __file__


def test_damaged_data_is_an_error_that_names_the_step_before(store):
    file = shard(store, 30)
    data = bytearray(file.read_bytes())
    data[-5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"store\.load\(step=20\)") as caught:
        store.load()
    assert (caught.value.file, caught.value.tensor) == (file.name, "w")
    assert store.load(step=20)["step"] == 20
    result = store.verify(30)
    assert not result.ok
    assert result.problems[0].file == file.name


def test_an_empty_store_says_so(tmp_path):
    store = penstock.CheckpointStore(tmp_path / "nothing")
    assert (store.steps(), store.latest()) == ([], None)
    with pytest.raises(CheckpointNotFoundError, match="nothing was saved"):
        store.load()


def test_what_was_read_back_survives_retention(tmp_path):
    store = penstock.CheckpointStore(tmp_path, keep_last=1)
    store.save(1, {"w": np.zeros(3)})
    store.load()
    for step in (2, 3):
        store.save(step, {"w": np.zeros(3)})
    assert store.steps() == [1, 3]
    assert store.verify(3).ok
    store.save(4, {})
    assert store.steps() == [3, 4]


@pytest.mark.parametrize(
    "arguments", [{"keep_last": 0}, {"keep_last": 1, "keep_every": 0}, {"keep_every": 5}]
)
def test_retention_that_makes_no_sense_is_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match="keep_"):
        penstock.CheckpointStore(tmp_path, **arguments)
