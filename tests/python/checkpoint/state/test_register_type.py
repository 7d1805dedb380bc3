"""Custom classes are stored once they are registered, and only registered ones are constructed."""

from __future__ import annotations

import dataclasses
import enum
import json
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import penstock
from compare import assert_same
from penstock.checkpoint.state import registered
from penstock.cli import cli
from penstock.errors import MissingDependencyError, StateMismatchError, UnsupportedStateError


class Colour(enum.Enum):
    RED = 1
    GREEN = (0, 255, 0)


class Number(enum.IntEnum):
    ONE = 1


class Mode(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Point(NamedTuple):
    x: int
    at: torch.Tensor


@dataclasses.dataclass
class Settings:
    rate: float
    colour: Colour
    layers: list[Any] = dataclasses.field(default_factory=list)
    steps: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        self.steps = -1


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    weight: Any


class Tokenizer:
    """A class whose state cannot be guessed."""

    def __init__(self, words):
        self.index = {word: number for number, word in enumerate(words)}


@pytest.fixture(autouse=True)
def no_types(monkeypatch):
    """Makes each test begin without registered types."""
    monkeypatch.setattr(registered, "_by_name", {})
    monkeypatch.setattr(registered, "_by_class", {})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ckpt"


def come_back(path, state):
    penstock.save(path, state)
    return penstock.load(path)


@pytest.mark.parametrize("value", [Colour.RED, Colour.GREEN, Number.ONE, Mode.READ | Mode.WRITE])
def test_a_member_of_a_registered_enum_comes_back_as_itself(path, value):
    penstock.register_type(type(value))
    found = come_back(path, {"a": [value], "b": {"c": value}})
    assert found == {"a": [value], "b": {"c": value}}
    assert found["a"][0] is value or type(value) is Mode


def test_a_dataclass_comes_back_with_its_tensors_and_without_its_init(path):
    for cls in (Colour, Settings, Frozen):
        penstock.register_type(cls)
    weight = torch.randn(3, 4)
    settings = Settings(0.5, Colour.GREEN, [Frozen(weight), weight])
    settings.steps = 7
    found = come_back(path, {"settings": settings, "model": {"weight": weight}})
    assert type(found["settings"]) is Settings
    assert (found["settings"].rate, found["settings"].colour) == (0.5, Colour.GREEN)
    assert found["settings"].steps == 7
    # Ties reach through values of classes.
    assert found["settings"].layers[0].weight is found["model"]["weight"]
    assert_same(found["model"]["weight"], weight)


def test_a_named_tuple_comes_back_as_one(path):
    penstock.register_type(Point)
    found = come_back(path, Point(3, torch.ones(2)))
    assert type(found) is Point
    assert found.x == 3
    assert_same(found.at, torch.ones(2))


def test_a_class_comes_back_by_its_own_functions(path):
    penstock.register_type(Tokenizer, lambda one: list(one.index), Tokenizer)
    found = come_back(path, {"tokenizer": Tokenizer(["a", "b"])})
    assert found["tokenizer"].index == {"a": 0, "b": 1}


def test_register_type_is_a_decorator():
    assert penstock.register_type(Frozen) is Frozen


@pytest.mark.parametrize(
    "value", [Colour.RED, Settings(1.0, Colour.RED), Point(1, torch.ones(1)), Tokenizer([])]
)
def test_what_is_not_registered_is_refused_and_register_type_is_named(path, value):
    with pytest.raises(UnsupportedStateError, match="register_type") as raised:
        penstock.save(path, {"run": {"value": value}})
    assert raised.value.key == "run.value"


def test_a_load_that_does_not_know_the_class_names_it_and_what_to_do(path, monkeypatch):
    penstock.register_type(Settings)
    penstock.register_type(Colour, name="colours.Colour")
    settings = Settings(0.5, Colour.RED, [torch.ones(2)])
    penstock.save(path, {"settings": settings, "step": 3})
    monkeypatch.setattr(registered, "_by_name", {})
    with pytest.raises(MissingDependencyError, match="register_type") as raised:
        penstock.load(path)
    assert "test_register_type.Settings" in str(raised.value)
    # The other leaves can be loaded, and all of the state as plain data.
    assert penstock.load(path, keys="step") == {"step": 3}
    plain = penstock.load(path, plain=True)["settings"]
    assert plain["(type)"].endswith("test_register_type.Settings")
    assert plain["rate"] == 0.5
    assert plain["colour"] == {"(type)": "colours.Colour", "(value)": "RED"}
    assert_same(plain["layers"], [torch.ones(2)])
    assert penstock.verify(path).ok


def test_a_store_passes_over_no_step_whose_class_is_not_registered(tmp_path, monkeypatch):
    penstock.register_type(Frozen)
    store = penstock.CheckpointStore(tmp_path)
    store.save(1, {"x": 1})
    store.save(2, {"x": Frozen(2)})
    monkeypatch.setattr(registered, "_by_name", {})
    for call in (store.load, lambda: store.load(fallback=True)):
        with pytest.raises(MissingDependencyError, match="Frozen"):
            call()
    assert store.load(plain=True)["x"]["weight"] == 2
    assert store.marks()[2].is_good


def test_no_module_is_imported_because_a_checkpoint_names_it(path, tmp_path):
    penstock.register_type(Frozen, name="evil.Payload")
    penstock.save(path, Frozen(1))
    (tmp_path / "evil.py").write_text("raise SystemExit(77)\nclass Payload: pass\n")
    program = (
        "import penstock, sys\n"
        "try: penstock.load(sys.argv[1])\n"
        "except penstock.errors.MissingDependencyError: print('evil' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


def test_two_classes_of_one_name_are_refused(path):
    penstock.register_type(Colour, name="Thing")
    with pytest.raises(ValueError, match="already"):
        penstock.register_type(Mode, name="Thing")
    assert come_back(path, Colour.RED) is Colour.RED


def test_a_class_that_was_moved_loads_by_its_old_name_and_saves_by_its_new_one(path, tmp_path):
    penstock.register_type(Frozen, name="old.Frozen")
    penstock.save(path, Frozen(1))
    penstock.register_type(Frozen, name="new.Frozen")
    assert penstock.load(path) == Frozen(1)
    penstock.save(tmp_path / "second", Frozen(1))
    assert penstock.load(tmp_path / "second", plain=True)["(type)"] == "new.Frozen"


def test_a_class_that_is_made_again_takes_the_place_of_the_first(path):
    def cell():
        @dataclasses.dataclass
        class Config:
            x: int

        return penstock.register_type(Config, name="Config")

    first, second = cell(), cell()
    assert first is not second
    assert type(come_back(path, second(1))) is second


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((3,), TypeError),
        ((dict,), TypeError),
        ((torch.Tensor,), TypeError),
        ((np.ndarray,), TypeError),
        ((Tokenizer,), TypeError),
        ((Tokenizer, vars), TypeError),
    ],
)
def test_what_cannot_be_registered_is_refused(arguments, error):
    with pytest.raises(error):
        penstock.register_type(*arguments)


@pytest.mark.parametrize("name", ["", "x" * 201, 3])
def test_a_name_has_1_to_200_characters(name):
    with pytest.raises(ValueError, match="characters"):
        penstock.register_type(Colour, name=name)


def test_a_class_of_a_function_needs_a_name():
    class Local(enum.Enum):
        A = 1

    with pytest.raises(TypeError, match="name="):
        penstock.register_type(Local)


def test_attributes_beside_the_fields_are_refused_by_name(path):
    penstock.register_type(Settings)
    penstock.register_type(Colour)
    settings = Settings(1.0, Colour.RED)
    settings.note = "lost otherwise"
    with pytest.raises(UnsupportedStateError, match="note") as raised:
        penstock.save(path, {"settings": settings})
    assert raised.value.key == "settings"


class Slotted:
    __slots__ = ("__hidden", "x")

    def hide(self, value):
        self.__hidden = value


@dataclasses.dataclass
class OverSlots(Slotted):
    y: int


@dataclasses.dataclass
class OverSlotsThatAreFields(Slotted):
    x: int


@pytest.mark.parametrize("fill", [lambda one: setattr(one, "x", 42), lambda one: one.hide(42)])
def test_slots_of_a_base_that_are_no_fields_are_refused_once_they_are_set(path, fill):
    penstock.register_type(OverSlots)
    penstock.save(path, {"one": OverSlots(1)})
    assert penstock.load(path)["one"].y == 1
    value = OverSlots(1)
    fill(value)
    with pytest.raises(UnsupportedStateError, match=r"no fields: (x|_Slotted__hidden)"):
        penstock.save(path, {"one": value}, overwrite=True)


def test_slots_of_a_base_that_are_fields_are_stored(path):
    penstock.register_type(OverSlotsThatAreFields)
    penstock.save(path, {"one": OverSlotsThatAreFields(7)})
    assert penstock.load(path)["one"].x == 7


def test_functions_that_fail_name_the_class_and_the_leaf(path):
    def fail(value):
        raise RuntimeError("broken")

    penstock.register_type(Tokenizer, fail, Tokenizer)
    with pytest.raises(UnsupportedStateError, match=r"run.*Tokenizer.*broken"):
        penstock.save(path, {"run": Tokenizer([])})
    penstock.register_type(Tokenizer, lambda one: list(one.index), fail)
    penstock.save(path, {"run": Tokenizer([])})
    with pytest.raises(StateMismatchError, match=r"Tokenizer.*broken"):
        penstock.load(path)


def test_a_dataclass_with_other_fields_than_were_stored_is_refused(path):
    penstock.register_type(Frozen, name="Class")
    penstock.save(path, Frozen(1))
    registered._by_name.clear()
    penstock.register_type(Settings, name="Class")
    with pytest.raises(StateMismatchError, match="weight"):
        penstock.load(path)


def test_a_value_that_holds_itself_is_refused(path):
    penstock.register_type(Frozen)
    inner = []
    value = Frozen(inner)
    inner.append(value)
    with pytest.raises(UnsupportedStateError, match="contains itself"):
        penstock.save(path, {"a": value})


def test_into_replaces_values_of_classes_and_fills_what_is_beside_them(path):
    penstock.register_type(Frozen)
    penstock.save(path, {"a": Frozen(torch.ones(2)), "b": torch.full((3,), 5.0)})
    target = {"a": Frozen(None), "b": torch.zeros(3)}
    kept = target["b"]
    penstock.load(path, into=target)
    assert_same(target["a"].weight, torch.ones(2))
    assert target["b"] is kept
    assert kept.tolist() == [5.0, 5.0, 5.0]


def test_into_and_plain_exclude_each_other(path):
    penstock.save(path, {"a": 1})
    with pytest.raises(ValueError, match="plain"):
        penstock.load(path, into={"a": 0}, plain=True)


def test_inspect_and_diff_look_into_values_of_classes(path, tmp_path, monkeypatch):
    penstock.register_type(Frozen)
    penstock.register_type(Colour)
    penstock.save(path, {"a": Frozen([1, torch.zeros(2)]), "c": Colour.RED})
    penstock.save(tmp_path / "other", {"a": Frozen([2, torch.ones(2)]), "c": Colour.GREEN})
    # Neither command needs the classes.
    monkeypatch.setattr(registered, "_by_name", {})
    info = penstock.inspect(path)
    assert [one.name for one in info.tensors] == ["a.weight.1"]
    assert info.values()["a.weight.0"] == 1
    assert info.values()["c.(value)"] == "RED"
    same = CliRunner().invoke(cli, ["diff", "--json", str(path), str(path)])
    assert json.loads(same.output)["same"]
    found = CliRunner().invoke(cli, ["diff", "--json", str(path), str(tmp_path / "other")])
    result = json.loads(found.output)
    assert {row["name"] for row in result["values"]} == {"a.weight.0", "c.(value)"}
    assert [row["name"] for row in result["tensors"]] == ["a.weight.1"]


def test_a_wrapper_of_tensors_needs_its_name_alone(path):
    class Halves(torch.Tensor):
        @staticmethod
        def __new__(cls, low, high):
            return torch.Tensor._make_wrapper_subclass(cls, (2, *low.shape), dtype=low.dtype)

        def __init__(self, low, high):
            self.low, self.high = low, high

        def __tensor_flatten__(self):
            return ["low", "high"], {"note": (1, "a")}

        @classmethod
        def __tensor_unflatten__(cls, inner, context, shape, strides):
            assert context == {"note": (1, "a")}
            return cls(inner["low"], inner["high"])

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError(function)

    penstock.register_type(Halves, name="Halves")
    low = torch.zeros(3)
    penstock.save(path, {"a": Halves(low, torch.ones(3)), "b": low})
    found = penstock.load(path)
    assert type(found["a"]) is Halves
    assert found["a"].low is found["b"]
    target = {"a": Halves(torch.rand(3), torch.rand(3)), "b": torch.rand(3)}
    kept = target["a"].high
    target["a"].low = target["b"]
    penstock.load(path, into=target)
    assert target["a"].high is kept
    assert kept.tolist() == [1.0, 1.0, 1.0]
