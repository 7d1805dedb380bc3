"""A loaded state equals the saved one: bit for bit, with ties and structure."""

from __future__ import annotations

import copy
import datetime as dt
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch

import penstock
from compare import assert_same, tensor_bytes
from conftest import tell
from training import MODELS, SEED, Run

pytestmark = pytest.mark.quick

STEPS_BEFORE = 4
STEPS_AFTER = 3


def round_trip(path, state, options=None):
    penstock.save(path, state, options=options)
    return penstock.load(path, options=options)


def random_tensor(dtype, shape, generator):
    """Returns any bit pattern of the type, including NaNs with payloads."""
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    count = math.prod(shape)
    most = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, most, (count * item_bytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


# Real training states.


@pytest.fixture(scope="module", params=list(MODELS), ids=list(MODELS))
def trained(request):
    """Returns a state in the middle of a run, and the losses of its uninterrupted rest."""
    tell("seed", SEED)
    run = Run(MODELS[request.param], SEED)
    for _ in range(STEPS_BEFORE):
        run.step()
    state = copy.deepcopy(run.state())
    losses = [run.step() for _ in range(STEPS_AFTER)]
    return MODELS[request.param], state, losses


def test_a_training_state_comes_back_bit_for_bit(trained, disk_path, options):
    _, state, _ = trained
    report = penstock.save(disk_path / "ckpt", state, options=options)
    reports = []
    loaded = penstock.load(disk_path / "ckpt", options=options, report=reports.append)
    assert_same(loaded, state)
    for one in (report, reports[0]):
        assert one.engine == options.engine
        assert one.direct_io == (options.direct == "on")


def test_a_resumed_run_continues_as_the_uninterrupted_one(trained, disk_path, options):
    make_model, state, losses = trained
    loaded = round_trip(disk_path / "ckpt", state, options)
    resumed = Run(make_model, seed=1)
    resumed.resume(loaded)
    assert [resumed.step() for _ in range(STEPS_AFTER)] == losses


def test_a_run_resumed_in_place_continues_as_the_uninterrupted_one(trained, disk_path, options):
    make_model, state, losses = trained
    penstock.save(disk_path / "ckpt", state, options=options)
    resumed = Run(make_model, seed=1)
    for _ in range(STEPS_BEFORE):
        resumed.step()
    target = resumed.state()
    penstock.load(disk_path / "ckpt", into=target, options=options)
    resumed.resume(target)
    assert [resumed.step() for _ in range(STEPS_AFTER)] == losses


def test_the_metadata_of_a_module_state_comes_back(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = model.state_dict()
    loaded = round_trip(tmp_path / "ckpt", state)
    assert type(loaded) is OrderedDict
    assert loaded._metadata == state._metadata
    assert_same(loaded, state)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), capturable=False),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.LBFGS(p, max_iter=2),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
    ],
    ids=["sgd", "adam-tensor-lr", "rmsprop", "adagrad", "adafactor", "lbfgs", "nadam", "radam"],
)
def test_an_optimizer_state_comes_back(tmp_path, make):
    model = torch.nn.Linear(5, 3)
    optimizer = make(list(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 5)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    state = optimizer.state_dict()
    assert_same(round_trip(tmp_path / "ckpt", state), state)


def test_every_numpy_bit_generator_comes_back(tmp_path):
    kinds = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox)
    generators = [np.random.Generator(kind(7)) for kind in (*kinds, np.random.SFC64)]
    states = [generator.bit_generator.state for generator in generators]
    loaded = round_trip(tmp_path / "ckpt", states)
    assert_same(loaded, states)
    expected = [generator.integers(1 << 62, size=4).tolist() for generator in generators]
    for generator, state in zip(generators, loaded, strict=True):
        generator.bit_generator.state = state
    assert [generator.integers(1 << 62, size=4).tolist() for generator in generators] == expected


# Element types.

QUANTIZED = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


@pytest.mark.parametrize("name", sorted(DTYPES.keys() - QUANTIZED))
@pytest.mark.filterwarnings("ignore:.*experimental")
def test_every_dtype_comes_back(disk_path, name):
    generator = torch.Generator().manual_seed(SEED)
    dtype = DTYPES[name]
    state = {
        "row": random_tensor(dtype, (1037,), generator),
        "box": random_tensor(dtype, (3, 5, 7), generator),
        "page": random_tensor(dtype, (4096,), generator),
        "scalar": random_tensor(dtype, (1,), generator)[0],
        "empty": torch.empty((0, 3), dtype=dtype),
    }
    assert_same(round_trip(disk_path / "ckpt", state), state)


@pytest.mark.filterwarnings("ignore:.*experimental")
def test_every_dtype_comes_back_in_one_checkpoint(disk_path, options):
    generator = torch.Generator().manual_seed(SEED)
    state = {
        name: random_tensor(dtype, (random.Random(name).randrange(9000),), generator)
        for name, dtype in DTYPES.items()
        if name not in QUANTIZED
    }
    assert_same(round_trip(disk_path / "ckpt", state, options), state)


@pytest.mark.parametrize("bits", [0x7FC1, 0xFFC1, 0x7F81, 0x8000, 0x0001])
def test_the_bits_of_a_bfloat16_come_back(tmp_path, bits):
    value = torch.tensor([bits], dtype=torch.uint16).view(torch.bfloat16)
    loaded = round_trip(tmp_path / "ckpt", value)
    assert loaded.view(torch.uint16).item() == bits


# Shapes and strides.


def layouts():
    base = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).reshape(2, 3, 4, 5)
    complexes = torch.view_as_complex(base.reshape(60, 2).clone())
    return {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0),
        "empty-in-the-middle": torch.empty(3, 0, 5),
        "transposed": base.transpose(1, 3),
        "permuted": base.permute(3, 1, 0, 2),
        "sliced-with-steps": base[:, ::2, 1::2, ::3],
        "sliced-to-nothing": base[:, 3:, :],
        "narrowed": base.narrow(3, 1, 3),
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 7),
        "expanded-scalar": torch.tensor(5.0).expand(3, 4),
        "channels-last": base.to(memory_format=torch.channels_last),
        "channels-last-3d": torch.rand(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d),
        "unfolded": torch.arange(10.0).unfold(0, 4, 2),
        "as-strided": torch.arange(30.0).as_strided((3, 2), (7, 2), 4),
        "diagonal": torch.rand(5, 5).diagonal(),
        "real-of-complex": complexes.real,
        "imaginary-of-complex": complexes.imag,
        "conjugated": complexes.conj(),
        "conjugated-transposed": complexes.reshape(6, 10).conj().T,
        "negated": complexes.conj().imag,
        "one-sized-dims": torch.rand(1, 1, 4, 1).transpose(0, 2),
        "many-dims": torch.rand([1] * 20 + [2, 3] + [1] * 20),
        "unaligned": torch.arange(100, dtype=torch.uint8)[3:77],
        "requires-grad": torch.rand(3, requires_grad=True),
        "of-a-graph": torch.rand(3, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.rand(2, 3)),
        "large-transposed": torch.rand(1500, 1100).t(),
        "large-steps": torch.rand(2_500_000)[::2],
        "large-unaligned": torch.rand(2_000_001)[1:],
    }


@pytest.mark.parametrize("layout", list(layouts()))
def test_every_layout_comes_back(disk_path, layout):
    state = {layout: layouts()[layout]}
    assert_same(round_trip(disk_path / "ckpt", state), state)


def test_all_layouts_come_back_together(disk_path, options):
    state = layouts()
    assert_same(round_trip(disk_path / "ckpt", state, options), state)


def test_an_inference_tensor_comes_back(tmp_path):
    with torch.inference_mode():
        value = torch.arange(5.0)
    assert_same(round_trip(tmp_path / "ckpt", value), value)


# Ties.


def test_a_tensor_under_two_names_comes_back_as_one(disk_path, options):
    weight = torch.rand(64, 64)
    state = {"embedding": weight, "head": weight, "deep": [{"again": weight}]}
    loaded = round_trip(disk_path / "ckpt", state, options)
    assert_same(loaded, state)
    loaded["embedding"][0, 0] = 7
    assert loaded["head"][0, 0] == 7


def test_a_tied_tensor_is_stored_once(tmp_path):
    weight = torch.rand(1000)
    report = penstock.save(tmp_path / "ckpt", [weight, weight, weight.view(10, 100)])
    assert (report.tensors, report.tensor_bytes) == (1, 4000)


@pytest.mark.parametrize("order", ["base first", "view first"])
def test_views_of_a_saved_tensor_share_its_memory(tmp_path, order):
    base = torch.arange(60.0).reshape(6, 10)
    views = {
        "transposed": base.t(),
        "row": base[2],
        "column": base[:, 3],
        "stepped": base[::2, 1::3],
        "flat": base.view(-1),
        "expanded": base[0].expand(4, 10),
        "scalar": base[5, 9],
        "folded": base.view(3, 2, 10),
    }
    state = {"base": base, **views} if order == "base first" else {**views, "base": base}
    loaded = round_trip(tmp_path / "ckpt", state)
    assert_same(loaded, state)
    loaded["base"].fill_(-1)
    assert all((loaded[name] == -1).all() for name in views)


def test_a_view_without_its_base_is_stored_alone(tmp_path):
    base = torch.rand(1 << 20)
    report = penstock.save(tmp_path / "ckpt", {"slice": base[10:20]})
    assert report.tensor_bytes == 40
    assert_same(penstock.load(tmp_path / "ckpt"), {"slice": base[10:20]})


def test_an_array_and_a_tensor_of_one_memory_stay_tied(tmp_path):
    array = np.arange(12, dtype=np.float32)
    state = {"array": array, "tensor": torch.from_numpy(array), "part": array[3:7]}
    loaded = round_trip(tmp_path / "ckpt", state)
    assert_same(loaded, state)
    loaded["array"][:] = 9
    assert (loaded["tensor"] == 9).all()
    assert (loaded["part"] == 9).all()


def test_tensors_that_were_apart_stay_apart(tmp_path):
    state = [torch.zeros(7), torch.zeros(7), torch.zeros(0), torch.zeros(0)]
    loaded = round_trip(tmp_path / "ckpt", state)
    loaded[0].fill_(1)
    assert (loaded[1] == 0).all()


# NumPy.


def arrays():
    base = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    return {
        "scalar": np.array(7),
        "empty": np.empty((0, 4), np.int16),
        "fortran": np.asfortranarray(base),
        "transposed": base.transpose(2, 0, 1),
        "negative-strides": base[::-1, :, ::-1],
        "negative-strides-partly": base[:, ::-1, ::2],
        "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
        "read-only": np.frombuffer(b"abcdefgh", np.uint8),
        "big-endian": np.arange(5, dtype=">f8"),
        "big-endian-int": np.arange(5, dtype=">u2"),
        "big-endian-complex": np.array([1 + 2j], ">c16"),
        "bool": np.array([True, False, True]),
        "float16": np.array([np.nan, -0.0, np.inf], np.float16),
        "complex64": np.array([1 - 2j], np.complex64),
        "complex128": np.array([complex(np.nan, -np.inf)]),
        "long-double": np.array([1, 2, 3], np.longdouble) / 3,
        "long-complex": np.array([1 + 1j], np.clongdouble) / 3,
        "str": np.array(["a", "ünïcode", "🦀\0x"]),
        "big-endian-str": np.array(["ab", "c"], dtype=">U3"),
        "bytes": np.array([b"abc", b"\0\xff"]),
        "void": np.array([b"ab", b"cd"], dtype="V2"),
        "datetime": np.array(["2024-02-29T12:00", "NaT"], "M8[ns]"),
        "datetime-multiple": np.array([1, 2], "M8[25us]"),
        "datetime-days": np.array([dt.date(2024, 1, 1)], "M8[D]"),
        "datetime-generic": np.array(["NaT"], "M8"),
        "timedelta": np.array([5, -5], "m8[s]"),
        "uint64": np.array([2**64 - 1], np.uint64),
        "unaligned": np.frombuffer(b"x" + bytes(range(16)), np.float32, offset=1),
        "stepped-fields": np.zeros(4, [("a", "<f4"), ("b", "<i8")])["b"],
        "large-negative": np.arange(1 << 20)[::-1],
    }


@pytest.mark.parametrize("kind", list(arrays()))
def test_every_array_comes_back(disk_path, kind):
    state = {kind: arrays()[kind]}
    assert_same(round_trip(disk_path / "ckpt", state), state)


def test_all_arrays_come_back_together(disk_path, options):
    state = arrays()
    assert_same(round_trip(disk_path / "ckpt", state, options), state)


def test_loaded_arrays_and_tensors_are_writable(tmp_path):
    state = {"array": np.frombuffer(b"abcd", np.uint8), "tensor": torch.zeros(3)}
    loaded = round_trip(tmp_path / "ckpt", state)
    assert loaded["array"].flags.writeable
    loaded["array"][0] = 1
    loaded["tensor"][0] = 1


def test_a_memory_map_comes_back_as_an_array(tmp_path):
    written = np.memmap(tmp_path / "map", np.int32, "w+", shape=(300, 7))
    written[:] = np.arange(2100).reshape(300, 7)
    assert_same(round_trip(tmp_path / "ckpt", {"map": written}), {"map": written})


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64("nan"),
        np.int8(-128),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 - 0j),
        np.longdouble(1) / 3,
        np.str_("trailing\0"),
        np.str_(""),
        np.str_("\ud800"),
        np.bytes_(b"trailing\0"),
        np.bytes_(b""),
        np.void(b"ab"),
        np.void(b""),
        np.datetime64("2024-02-29T12:00:00.123"),
        np.datetime64("NaT"),
        np.timedelta64(5, "s"),
        np.timedelta64(5, "25us"),
    ],
    ids=repr,
)
def test_a_numpy_scalar_comes_back(tmp_path, value):
    assert_same(round_trip(tmp_path / "ckpt", {"x": value}), {"x": value})


# Other memory.


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 1 << 16, 3_000_001])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_come_back(disk_path, kind, size):
    value = kind(random.Random(SEED).randbytes(size))
    state = {"a": value, "b": [value]}
    assert_same(round_trip(disk_path / "ckpt", state), state)


def test_a_memory_view_comes_back_as_an_array(tmp_path):
    value = memoryview(bytearray(range(200)))[10:150:3]
    assert_same(round_trip(tmp_path / "ckpt", {"v": value}), {"v": value})


def test_what_has_dlpack_comes_back_as_an_array(tmp_path):
    class Foreign:
        def __init__(self):
            self.array = np.arange(5.0)

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__(**arguments)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    loaded = round_trip(tmp_path / "ckpt", {"x": Foreign()})
    assert_same(loaded, {"x": np.arange(5.0)})


def test_an_array_of_the_standard_library_comes_back_as_an_array(tmp_path):
    import array

    loaded = round_trip(tmp_path / "ckpt", array.array("d", [1.0, 2.0]))
    assert_same(loaded, np.array([1.0, 2.0]))


# Plain values and containers.

NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]

PLAIN = [
    None,
    True,
    False,
    0,
    -1,
    2**53 - 1,
    2**53,
    -(2**53),
    2**64,
    -(10**5000),
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    math.nan,
    NAN_WITH_PAYLOAD,
    1e16,
    -1e22,
    complex(-0.0, math.nan),
    "",
    "text",
    "ünï 🦀 \0 \x7f \u2028",
    "\ud800 lone",
    "\udc00\ud800",
    b"",
    b"\0\xff",
    range(3),
    range(10, -5, -3),
    range(2**80, 2**81),
    slice(None),
    slice(1, -1, 2),
    slice(2**70, None),
    torch.Size([]),
    torch.Size([2, 0, 3]),
    torch.float8_e5m2,
    torch.quint8,
    torch.device("cpu"),
    torch.device("cuda:3"),
    torch.device("meta"),
    np.dtype("<f4"),
    np.dtype(">M8[ns]"),
    np.dtype("U7"),
    [],
    (),
    {},
    set(),
    frozenset(),
    OrderedDict(),
    Counter(),
    defaultdict(list),
    defaultdict(None),
    [[]],
    ((),),
    {"$": 1},
    {"$": "tensor", "i": 0},
    {"": {"": 1}},
    {1: "int", "1": "str"},
    {1.5: 1, math.inf: 2, -math.inf: 3},
    {True: 1, None: 2, (1, "a", (2.0, None)): 3, (): 4},
    {2**70: 1, "\ud800": 2},
    {"bytes": b"x"},
    {1, 2.5, "three", (4, (5,)), None, frozenset({6})},
    frozenset({b"a", True, math.inf}),
    {"__metadata__": 1, "a.b": {"c": 2}, "a": {"b.c": 3}},
    OrderedDict([("z", 1), ("a", OrderedDict([(3, 4)]))]),
    Counter({"a": 3, 2: -1}),
    defaultdict(int, {"a": 1}),
    defaultdict(dict, {1: {2: 3}}),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_a_plain_value_comes_back(tmp_path, value):
    assert_same(round_trip(tmp_path / "ckpt", value), value)


def test_all_plain_values_come_back_together(disk_path, options):
    assert_same(round_trip(disk_path / "ckpt", PLAIN, options), PLAIN)


def test_a_range_of_truth_values_comes_back_or_is_refused(tmp_path):
    value = {"r": range(True)}
    assert round_trip(tmp_path / "ckpt", value) == value


def test_names_that_collide_keep_their_tensors_apart(tmp_path):
    state = {
        "a.b": torch.tensor([1]),
        "a": {"b": torch.tensor([2])},
        1: torch.tensor([3]),
        "1": torch.tensor([4]),
        "": torch.tensor([5]),
        "__metadata__": torch.tensor([6]),
        "a.b~2": torch.tensor([7]),
        "\ud800": torch.tensor([8]),
        "\\ud800": torch.tensor([9]),
        "/etc/passwd": torch.tensor([10]),
        "../..": torch.tensor([11]),
        'quo"te\\': torch.tensor([12]),
        "nul\0": torch.tensor([13]),
        None: torch.tensor([14]),
        (1, 2): torch.tensor([15]),
    }
    assert_same(round_trip(tmp_path / "ckpt", state), state)
    assert penstock.verify(tmp_path / "ckpt").ok


DEEP = {
    "list": lambda x: [x],
    "tuple": lambda x: (x,),
    "dict": lambda x: {"k": x},
    "int keys": lambda x: {1: x},
    "tuple keys": lambda x: {(1, (2,)): x},
    "ordered": lambda x: OrderedDict(k=x),
    "default": lambda x: defaultdict(list, {1: x}),
}


def deepest(kind):
    state = torch.arange(3)
    for _ in range(128):
        state = DEEP[kind](state)
    return state


@pytest.mark.parametrize("kind", list(DEEP))
def test_the_deepest_state_allowed_comes_back(tmp_path, kind):
    state = deepest(kind)
    assert_same(round_trip(tmp_path / "ckpt", state), state)


@pytest.mark.parametrize("kind", list(DEEP))
def test_the_deepest_state_allowed_can_be_filled_and_selected_from(tmp_path, kind):
    state, target = deepest(kind), deepest(kind)
    penstock.save(tmp_path / "ckpt", state)
    assert_same(penstock.load(tmp_path / "ckpt", keys="*"), state)
    assert_same(penstock.load(tmp_path / "ckpt", into=target), state)
    assert len(penstock.inspect(tmp_path / "ckpt").tensors) == 1
    assert penstock.inspect(tmp_path / "ckpt").values() == {}


def test_a_state_fills_itself_with_values_that_are_per_rank(tmp_path):
    def state(fill, extra):
        values = {"own": torch.full((3,), fill), "more": [extra, penstock.PerRank(extra)]}
        return {"all": penstock.PerRank(values), "one": penstock.PerRank(torch.full((2,), fill))}

    penstock.save(tmp_path / "ckpt", state(1.0, 5))
    target = state(0.0, 0)
    own, one = target["all"].value["own"], target["one"].value
    loaded = penstock.load(tmp_path / "ckpt", into=target)
    assert_same(loaded, penstock.load(tmp_path / "ckpt"))
    assert loaded["all"]["more"] == [5, 5]
    assert loaded["all"]["own"] is own
    assert loaded["one"] is one
    assert one.tolist() == [1.0, 1.0]


def test_the_deepest_key_allowed_comes_back(tmp_path):
    key = ()
    for _ in range(127):
        key = (key,)
    assert round_trip(tmp_path / "ckpt", {key: 1}) == {key: 1}


def test_ten_thousand_tensors_come_back(disk_path, options):
    state = {f"layer.{i}": torch.full((i % 7,), i) for i in range(10_000)}
    loaded = round_trip(disk_path / "ckpt", state, options)
    assert all(tensor_bytes(loaded[name]) == tensor_bytes(state[name]) for name in state)
    assert list(loaded) == list(state)


@pytest.mark.parametrize("extent_mib", [1, 4, 32])
@pytest.mark.parametrize("queue_depth", [1, 64])
def test_every_extent_and_depth_gives_the_same_bytes(disk_path, options, extent_mib, queue_depth):
    generator = torch.Generator().manual_seed(SEED)
    state = [
        random_tensor(torch.float32, (n,), generator) for n in (1 << 20, 3_000_017, 5, 262_144)
    ]
    sizes = {"extent_bytes": extent_mib << 20, "queue_depth": queue_depth, "io_threads": 2}
    chosen = penstock.Options(engine=options.engine, direct=options.direct, **sizes)
    assert_same(round_trip(disk_path / "ckpt", state, chosen), state)


def test_a_checkpoint_of_one_engine_loads_with_the_other(disk_path, options):
    state = {"w": torch.rand(1_500_000), "small": torch.rand(3)}
    penstock.save(disk_path / "ckpt", state, options=penstock.Options(engine="threads"))
    assert_same(penstock.load(disk_path / "ckpt", options=options), state)


def test_a_moved_checkpoint_loads(tmp_path):
    state = {"w": torch.rand(10)}
    penstock.save(tmp_path / "ckpt", state)
    (tmp_path / "ckpt").rename(tmp_path / "elsewhere")
    assert_same(penstock.load(tmp_path / "elsewhere"), state)
