"""Pytrees of JAX are restored as they were saved, on any devices."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import textwrap
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import tree_util

import forks
import penstock
from conftest import mounted
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingDependencyError,
    PenstockWarning,
    StateMismatchError,
    StorageError,
    UnsupportedStateError,
)
from penstock.integrations import jax as pj
from penstock.integrations import versions
from penstock.integrations.jax import fitting, loading
from penstock.integrations.jax.background import Background
from penstock.integrations.jax.trees import to_state

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.masked(optax.trace(0.9), {"w": True, "b": False}),
    optax.adamw(optax.linear_schedule(1e-3, 0, 100)),
)


def training():
    params = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, jnp.bfloat16)}
    return {
        "params": params,
        "opt": OPTIMIZER.init(params),
        "key": jax.random.key(7),
        "step": 3,
        "place": {"epoch": 1, "names": ["a", "b"], "none": None},
    }


def equal(one: Any, other: Any) -> bool:
    """Whether two pytrees are equal: structure, types, bits."""
    first, second = (tree_util.tree_flatten(tree) for tree in (one, other))
    return first[1] == second[1] and all(map(_same, first[0], second[0]))


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, jax.Array):
        return type(one) is type(other) and bool(np.all(one == other))
    if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        facts = [(x.dtype, x.shape) for x in (one, other)]
        one, other = jax.random.key_data(one), jax.random.key_data(other)
    else:
        facts = [(type(x), x.dtype, x.shape, x.weak_type, x.committed) for x in (one, other)]
    return facts[0] == facts[1] and np.asarray(one).tobytes() == np.asarray(other).tobytes()


def roundtrip(tmp_path, pytree):
    pj.save(tmp_path / "ckpt", pytree)
    return pj.load(tmp_path / "ckpt", like=pytree)


def test_states_of_optax_come_back_as_the_same_types(tmp_path):
    state = training()
    updates = jax.tree.map(jnp.ones_like, state["params"])
    _, state["opt"] = OPTIMIZER.update(updates, state["opt"], state["params"])
    pj.save(tmp_path / "ckpt", state, step=3)
    for like in (training(), jax.tree.map(_struct, training())):
        loaded = pj.load(tmp_path / "ckpt", like=like)
        assert equal(loaded, state)
    assert type(loaded["opt"][2][0]).__name__ == "ScaleByAdamState"
    assert penstock.inspect(tmp_path / "ckpt").step == 3


def _struct(leaf):
    is_array = isinstance(leaf, jax.Array)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_array else leaf


def test_without_like_containers_are_plain_and_penstock_loads_them_too(tmp_path):
    pj.save(tmp_path / "ckpt", training())
    loaded = pj.load(tmp_path / "ckpt")
    adam = loaded["opt"][2][0]
    assert list(adam) == ["count", "mu", "nu"]
    assert type(adam["count"]) is np.ndarray
    assert loaded["opt"][1]["inner_state"]["trace"]["b"] == {}
    assert loaded["params"]["b"].dtype == ml_dtypes.bfloat16
    assert loaded["key"] == jax.random.key(7)
    assert loaded["place"] == {"epoch": 1, "names": ["a", "b"], "none": None}
    # By names of fields, and without JAX.
    part = penstock.load(tmp_path / "ckpt", keys=["opt.2.0.mu.w", "key.*"])
    assert part["opt"][0][0]["mu"]["w"].tolist() == np.zeros((2, 3)).tolist()
    assert part["key"]["prng_impl"] == "fry" or part["key"]["prng_impl"] == "threefry2x32"
    assert penstock.verify(tmp_path / "ckpt").ok


# Types of JAX for which XLA lacks operations on the CPU.
NOT_ON_CPU = {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn"}
DTYPES = ["bool", "uint8", "int16", "uint32", "float16", "float32", "complex64"]
DTYPES += [
    name
    for name in vars(ml_dtypes)
    if re.match(r"(bfloat|float|u?int)[0-9]", name)
    and hasattr(jnp, name)
    and name not in NOT_ON_CPU
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_elements_comes_back_bit_for_bit(tmp_path, dtype):
    values = np.arange(24).reshape(4, 6) % 2
    state = [jnp.asarray(values.astype(dtype)), jnp.zeros((0, 3), dtype), jnp.ones((), dtype)]
    assert equal(roundtrip(tmp_path, state), state)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_come_back_as_keys_of_their_generator(tmp_path, impl):
    keys = jax.random.split(jax.random.key(3, impl=impl), 4).reshape(2, 2)
    state = {"key": keys[0, 0], "keys": keys, "old": jax.random.PRNGKey(1)}
    loaded = roundtrip(tmp_path, state)
    assert equal(loaded, state)
    assert equal(pj.load(tmp_path / "ckpt")["keys"], keys)
    draws = [jax.random.normal(one["key"], (3,)).tolist() for one in (state, loaded)]
    assert draws[0] == draws[1]
    other = jax.random.key(0, impl="rbg" if impl == "threefry2x32" else "threefry2x32")
    with pytest.raises(StateMismatchError, match="key: keys of"):
        pj.load(tmp_path / "ckpt", like=state | {"key": other})


@tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array
    inner: dict
    name: str = dataclasses.field(metadata={"static": True}, default="m")


class Frozen(dict):
    """A dictionary that is registered as flax registers its own."""


tree_util.register_pytree_with_keys(
    Frozen,
    lambda one: ([(tree_util.DictKey(key), one[key]) for key in sorted(one)], tuple(sorted(one))),
    lambda keys, children: Frozen(zip(keys, children, strict=True)),
)


class Numbered:
    def __init__(self, *parts):
        self.parts = parts


tree_util.register_pytree_node(Numbered, lambda one: (one.parts, None), lambda _, x: Numbered(*x))


class Pair(NamedTuple):
    left: Any
    right: Any


def test_keys_of_a_generator_that_is_not_here_are_named(tmp_path):
    words = {"prng_impl": "mine", "prng_data": np.zeros(2, np.uint32)}
    penstock.save(tmp_path / "mine", {"keys": [words]})
    for like in (None, {"keys": [jax.random.key(0)]}):
        with pytest.raises(StateMismatchError, match=r"keys\.0: keys of 'mine'") as error:
            pj.load(tmp_path / "mine", like=like)
        assert error.value.key == "keys.0"
    penstock.save(tmp_path / "long", {"key": words | {"prng_impl": "threefry2x32"}})
    assert pj.load(tmp_path / "long")["key"] == jax.random.wrap_key_data(words["prng_data"])
    long = {"prng_impl": "threefry2x32", "prng_data": np.zeros(3, np.uint32)}
    penstock.save(tmp_path / "long", {"key": long}, overwrite=True)
    with pytest.raises(CorruptCheckpointError, match="no words of keys"):
        pj.load(tmp_path / "long", like={"key": jax.random.key(0)})


def test_registered_nodes_come_back_as_those_of_like(tmp_path):
    w = jnp.ones(3)
    state = {
        "model": Model(w, {"x": w + 1}, "mine"),
        "frozen": Frozen(b=w + 2, a=Frozen()),
        "numbered": Numbered(w, 5),
        "pair": Pair(w, (w, [w])),
        "ordered": OrderedDict(z=w, a=w),
        1: {(2, "x"): w},
        "numpy": np.arange(3, dtype=np.int64),
        "scalar": np.float64(2.5),
    }
    ordered = {key: state[key] for key in state if key != 1}
    assert equal(roundtrip(tmp_path, ordered), ordered)
    pj.save(tmp_path / "ints", {1: {2: w}})
    assert equal(pj.load(tmp_path / "ints", like={1: {2: w}}), {1: {2: w}})
    loaded = pj.load(tmp_path / "ckpt")
    assert list(loaded["model"]) == ["w", "inner"]
    assert list(loaded["numbered"].values())[1] == 5
    assert list(loaded["pair"]) == ["left", "right"]


def test_weak_types_and_uncommitted_arrays_stay_that(tmp_path):
    state = {
        "weak": jnp.asarray(1.0),
        "committed": jax.device_put(jnp.ones(3), jax.devices()[0]),
        "free": jnp.ones(3),
    }
    assert state["weak"].weak_type
    assert equal(roundtrip(tmp_path, state), state)


def test_an_array_that_occurs_twice_is_stored_once(tmp_path):
    w = jnp.ones((64, 64))
    report = pj.save(tmp_path / "ckpt", {"in": w, "out": w})
    assert report.tensor_bytes == w.nbytes


def test_a_deleted_array_and_others_without_a_value_are_named(tmp_path):
    state = training()
    jax.jit(lambda params: jax.tree.map(lambda x: x + 1, params), donate_argnums=0)(state["params"])
    for call in (pj.save, pj.save_async):
        with pytest.raises(UnsupportedStateError, match="donate") as error:
            call(tmp_path / "ckpt", state)
        assert error.value.key.startswith("params.")
    # It works as a template.
    pj.save(tmp_path / "ckpt", training())
    assert equal(pj.load(tmp_path / "ckpt", like=state), training())
    with pytest.raises(UnsupportedStateError, match=r"a\.0: it is traced"):
        jax.jit(lambda x: pj.save(tmp_path / "traced", {"a": [x]}))(jnp.ones(3))
    with pytest.raises(UnsupportedStateError, match=r"a\.0: a jax.ShapeDtypeStruct"):
        pj.save(tmp_path / "blank", {"a": [jax.ShapeDtypeStruct((3,), "float32")]})
    with pytest.raises(UnsupportedStateError, match="f: a value of type function"):
        pj.save(tmp_path / "code", {"f": lambda: 1})
    assert sorted(os.listdir(tmp_path)) == ["ckpt"]


def test_what_does_not_fit_like_is_named_and_says_what_to_do(tmp_path):
    state = {"a": jnp.ones(3), "b": {"c": jnp.ones(2), "n": None}, "x": 1, "k": jax.random.key(0)}
    pj.save(tmp_path / "ckpt", state)
    struct = jax.ShapeDtypeStruct
    for change, text in [
        ({"a": struct((4,), "float32")}, r"a: shape \(3,\) in the checkpoint, \(4,\) in like"),
        ({"a": struct((3,), "int32")}, r"a: dtype float32 in the checkpoint, int32 in like"),
        ({"a": 1}, r"a: an array in the checkpoint, int in like"),
        ({"x": jnp.ones(3)}, r"x: a plain value in the checkpoint, an array in like"),
        ({"b": {"c": jnp.ones(2)}}, r"b\.n: is in the checkpoint, not in like"),
        ({"b": Pair(jnp.ones(2), None)}, r"b\.left: is in like, not in the checkpoint"),
        ({"b": jnp.ones(2)}, r"b: a container in the checkpoint, an array in like"),
        ({"k": jnp.ones(2)}, r"k: a container in the checkpoint, an array in like"),
        ({"a": jax.random.key(0)}, r"a: typed keys of jax.random in like, something else"),
        ({"more": jnp.ones(1)}, r"more: is in like, not in the checkpoint"),
    ]:
        with pytest.raises(StateMismatchError, match=text) as error:
            pj.load(tmp_path / "ckpt", like=state | change)
        assert "keys=" in str(error.value)
        assert error.value.path == str(tmp_path / "ckpt")
    penstock.save(tmp_path / "wide", {"a": np.arange(3)})
    with pytest.raises(StateMismatchError, match="a: JAX makes int32 of int64"):
        pj.load(tmp_path / "wide", like={"a": jax.sharding.SingleDeviceSharding(jax.devices()[0])})
    with pytest.raises(CheckpointNotFoundError):
        pj.load(tmp_path / "nothing", like=state)
    with pytest.raises(StateMismatchError, match="nope"):
        pj.load(tmp_path / "ckpt", like={}, keys="nope.*")


def test_keys_choose_leaves_and_tensors_of_torch_become_arrays(tmp_path):
    import torch

    pj.save(tmp_path / "ckpt", training())
    params = training()["params"]
    loaded = pj.load(tmp_path / "ckpt", like={"params": params}, keys="params.*")
    assert equal(loaded, {"params": params})
    base = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    penstock.save(tmp_path / "torch", {"w": base, "first": base[0], "none": torch.zeros(0, 2)})
    like = {
        "w": jax.ShapeDtypeStruct((2, 3), "bfloat16"),
        "first": jax.ShapeDtypeStruct((3,), "bfloat16"),
        "none": np.zeros((0, 2), "float32"),
    }
    loaded = pj.load(tmp_path / "torch", like=like)
    assert loaded["w"].tolist() == base.tolist()
    assert loaded["first"].tolist() == [0, 1, 2]
    assert loaded["none"].shape == (0, 2)


@pytest.mark.parametrize("copy", [False, True])
def test_a_step_that_is_given_the_buffers_changes_nothing_of_a_save(tmp_path, copy):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
    arrays = {str(i): jnp.full((1 << 20,), i, jnp.float32) for i in range(16)}
    wanted = jax.tree.map(lambda x: np.array(x), arrays)
    numpy = np.arange(4)
    pending = pj.save_async(tmp_path / "ckpt", {"arrays": arrays, "numpy": numpy}, copy=copy)
    numpy[:] = 0
    for _ in range(5):
        arrays = step(arrays)
    report = pending.result()
    assert not any("copied at the call" in text for text in report.fallbacks)
    loaded = pj.load(tmp_path / "ckpt")
    assert all(np.array_equal(loaded["arrays"][name], wanted[name]) for name in wanted)
    assert loaded["numpy"].tolist() == [0, 1, 2, 3]


def test_arrays_are_read_where_they_are():
    w = jnp.ones((256, 256))
    view = to_state({"w": w}, copies=True)["w"]
    assert view.ctypes.data == w.unsafe_buffer_pointer()


def test_an_error_in_the_background_comes_from_the_next_save(tmp_path, need_root):
    state = {"w": jnp.ones(1 << 20)}
    with (
        mounted("tmpfs", tmp_path / "small", 6 << 20),
        pj.Checkpoints(tmp_path / "small", keep_last=1) as checkpoints,
    ):
        checkpoints.save(1, state)
        checkpoints.save_async(2, state)
        with pytest.raises(StorageError, match="space"):
            checkpoints.save_async(3, state)
        # The previous checkpoint is whole, and training continues.
        assert checkpoints.steps() == [1]
        assert equal(checkpoints.load(like=state), state)
        checkpoints.store.delete(1)
        checkpoints.save(4, state)
        assert checkpoints.steps() == [4]


def test_a_wait_that_is_interrupted_forgets_no_save(tmp_path, monkeypatch):
    """Among several processes; for a single one the store remembers it."""
    is_over = threading.Event()

    class Failing:
        path = str(tmp_path)

        def run(self):
            is_over.wait()
            raise StorageError("no space", path=self.path, errno=28)

    background = Background()
    pending = background.begin(Failing())
    with monkeypatch.context() as patch:
        patch.setattr(pending, "result", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            background.wait()
    is_over.set()
    with pytest.raises(StorageError, match="no space"):
        background.wait()
    background.wait()
    background._executor.shutdown()


def test_steps_are_kept_and_resumed_from_the_newest_good_one(tmp_path):
    state = {"w": jnp.zeros(3), "step": 0}
    with pj.Checkpoints(tmp_path, keep_last=2) as checkpoints:
        assert checkpoints.resume(state) is None
        with pytest.raises(CheckpointNotFoundError):
            checkpoints.load()
        for step in range(1, 5):
            checkpoints.save_async(step, {"w": jnp.full(3, float(step)), "step": step})
        assert checkpoints.resume(state)[0] == 4
        assert checkpoints.steps() == [3, 4]
        with pytest.raises(CheckpointExistsError):
            checkpoints.save_async(4, state)
        _flip(checkpoints.store.path(4))
        with pytest.raises(CorruptCheckpointError):
            checkpoints.load(like=state)
        with pytest.warns(PenstockWarning, match="step 4 is passed over"):
            step, loaded = checkpoints.resume(state)
        assert (step, loaded["step"], loaded["w"].tolist()) == (3, 3, [3.0] * 3)
        # The step is saved anew, and the damaged one does not count.
        assert checkpoints.steps() == [3]
        checkpoints.save(4, state)
        assert checkpoints.steps() == [3, 4]
        _flip(checkpoints.store.path(3))
        _flip(checkpoints.store.path(4))
        with (
            pytest.warns(PenstockWarning),
            pytest.raises(CorruptCheckpointError, match="none of its checkpoints is good"),
        ):
            checkpoints.resume(state)


def _flip(step):
    shard = next(os.path.join(step, name) for name in os.listdir(step) if "shard" in name)
    with open(shard, "r+b") as file:
        file.seek(4100)
        byte = file.read(1)
        file.seek(4100)
        file.write(bytes([byte[0] ^ 1]))


def run(script: str, *arguments: object, popen: type = forks.JaxPopen) -> Any:
    done = forks.run(["-c", textwrap.dedent(script), *map(str, arguments)], popen=popen)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FOUR_DEVICES = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    jax.config.update("jax_num_cpu_devices", 4)
    import penstock
    from penstock.integrations import jax as pj
    path = sys.argv[1]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    def on(*spec): return NamedSharding(mesh, P(*spec))
    whole = jnp.arange(96.0).reshape(8, 12)
"""


@pytest.mark.slow
def test_arrays_of_several_devices_go_from_any_layout_to_any(tmp_path):
    script = (
        FOUR_DEVICES
        + """
    specs = [(), ("a",), ("b", "a"), (("a", "b"), None), (None, "b")]
    state = {str(spec): jax.device_put(whole, on(*spec)) for spec in specs}
    state["tied"] = state["('a',)"]
    state["one"] = jax.device_put(whole, jax.devices()[3])
    state["int4"] = jax.device_put(whole.astype(jnp.int4), on("a", "b"))
    state["none"] = jax.device_put(jnp.zeros((0, 4)), on(None, "b"))
    state["key"] = jax.device_put(jax.random.split(jax.random.key(0), 4), on("a"))
    report = pj.save_async(path, state).result()
    found = [report.tensor_bytes]
    def bits(name, x):
        return np.asarray(jax.random.key_data(x) if name == "key" else x).tobytes()
    for spec in specs:
        like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on(*spec) if x.ndim == 2 and
                x.size else None) for name, x in state.items()}
        loaded = pj.load(path, like=like)
        found.append(all(
            bits(name, x) == bits(name, state[name])
            and (x.ndim != 2 or not x.size or x.sharding == on(*spec))
            for name, x in loaded.items()))
    same = pj.load(path, like=state)
    found.append(all(x.sharding == state[name].sharding for name, x in same.items()))
    found.append(np.array_equal(penstock.load(path)["('b', 'a')"], whole))
    found.append(penstock.verify(path).ok)
    print(json.dumps(found))
    """
    )
    tensor_bytes, *rest = run(script, tmp_path / "ckpt")
    # One replica is written, and equal arrays are written once.
    assert tensor_bytes == 5 * 96 * 4 + 96 * 4 + 96 + 4 * 2 * 4
    assert rest == [True] * 8


def test_what_a_process_has_on_several_devices_of_its_own_is_whole_among_processes():
    script = (
        FOUR_DEVICES.replace("path = sys.argv[1]", "")
        + """
    from penstock.integrations.jax.trees import to_state
    state = {"rows": jax.device_put(whole, on("a")), "same": jax.device_put(whole, on()),
             "none": jax.device_put(jnp.zeros((0, 4)), on())}
    boxes = to_state(state, copies=False, is_shared=True)
    found = np.full(whole.shape, np.nan, np.float32)
    for (row, column), piece in boxes["rows"].pieces:
        found[row : row + piece.shape[0], column : column + piece.shape[1]] = piece
    print(json.dumps([boxes["rows"].shape == whole.shape, np.array_equal(found, whole),
                      len(boxes["same"].pieces), boxes["none"].shape == (0, 4)]))
    """
    )
    assert run(script) == [True, True, 1, True]


def test_a_sharding_in_like_places_all_that_is_below_it(tmp_path):
    script = (
        FOUR_DEVICES
        + """
    state = {"layers": [{"w": whole, "b": np.arange(4, dtype=np.int32)}, ({"w": whole},)],
             "key": jax.random.key(1), "step": 3}
    pj.save(path, state)
    loaded = pj.load(path, like={"layers": on("b"), "key": on(), "step": 0})
    first, (second,) = loaded["layers"]
    everything = pj.load(path, like=on())
    try:
        pj.load(path, like={"layers": on(None, None, "a"), "key": on(), "step": 0})
        error = None
    except penstock.errors.StateMismatchError as caught:
        error = str(caught)
    print(json.dumps([
        first["w"].sharding == on("b"), np.array_equal(second["w"], whole),
        first["b"].sharding == on("b"), loaded["key"].sharding.is_fully_replicated,
        loaded["step"], everything["layers"][0]["w"].sharding == on(), everything["step"], error,
    ]))
    """
    )
    *found, error = run(script, tmp_path / "ckpt")
    assert found == [True, True, True, True, 3, True, 3]
    assert "layers.0.b: (4,) does not lie as" in error


TWO_PROCESSES = """
    import json, sys, warnings
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    jax.config.update("jax_num_cpu_devices", 2)
    path, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    import penstock
    from penstock.integrations import jax as pj
    mesh = Mesh(np.array(jax.devices()), ("d",))
    def on(*spec): return NamedSharding(mesh, P(*spec))
    host = np.arange(96.0, dtype=np.float32).reshape(8, 12)
    def spread(*spec): return jax.make_array_from_callback((8, 12), on(*spec), lambda i: host[i])
    def held(x):
        return all(np.array_equal(one.data, host[one.index]) for one in x.addressable_shards)
    state = {"rows": spread("d"), "columns": spread(None, "d"), "same": spread(),
             "own": jnp.ones(3), "key": jax.random.key(5), "numpy": np.arange(4), "step": 7,
             "local": jax.device_put(jnp.arange(8.0), NamedSharding(
                 Mesh(np.array(jax.local_devices()), ("l",)), P("l"))),
             "none": jnp.zeros((0, 3)), "second": jax.random.key(6), "set": set("abcdefgh"),
             "long": b"x" * 9000}
    found = []
    def refused(call):
        try:
            call()
        except penstock.PenstockError as error:
            return f"{type(error).__name__}: {error}"
"""


@pytest.mark.slow
def test_two_processes_make_one_checkpoint_and_load_any_layout_of_it(tmp_path):
    script = (
        TWO_PROCESSES
        + """
    report = pj.save(path + "/a", state, step=7)
    found += [report.world_size, report.rank, report.step]
    loaded = pj.load(path + "/a", like=state)
    found += [held(loaded["rows"]), held(loaded["columns"]), held(loaded["same"])]
    found += [bool(loaded["key"] == state["key"]), loaded["long"] == state["long"], loaded["step"]]
    found.append(np.array_equal(loaded["local"], np.arange(8.0)) and loaded["none"].shape == (0, 3)
                 and bool(loaded["second"] == state["second"]) and loaded["set"] == state["set"])
    other = pj.load(path + "/a", like=state | {"rows": on(None, "d"), "columns": on("d")})
    found += [held(other["rows"]), held(other["columns"])]
    found.append(refused(lambda: pj.save(path + "/a", state)))
    found.append(refused(lambda: pj.save(path + "/b", state | {"own": jnp.full(3, float(rank))})))
    found.append(refused(lambda: pj.save(path + "/c", state | {f"only{rank}": 1})))
    found.append(refused(lambda: pj.save(path + "/d", state | {"f": print} if rank else state)))
    with pj.Checkpoints(path + "/steps", keep_last=2) as checkpoints:
        found.append(checkpoints.resume(state))
        for step in (1, 2, 3):
            checkpoints.save(step, state)
        if rank == 0:
            # Only the second process reads this shard.
            import glob
            shard, = glob.glob(checkpoints.store.path(3) + "/shard-00001*")
            with open(shard, "r+b") as file:
                file.seek(4096)
                file.write(b"damaged")
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            from penstock.integrations.jax.processes import from_all
            from_all(path, "damaged")
            step, resumed = checkpoints.resume(state)
        found += [step, held(resumed["rows"]), checkpoints.steps()]
        other = state | {"own": jnp.ones(4)} if rank else state
        found.append(refused(lambda: checkpoints.resume(other)))
    # Two at once, of which the one that began last may end first.
    with pj.Checkpoints(path + "/best") as best, pj.Checkpoints(path + "/last") as last:
        for step in range(6):
            pending = best.save_async(step, state)
            last.save(step, {"own": state["own"]})
            pending.result()
        found.append([best.steps(), last.steps()])
    found.append(refused(lambda: pj.save(path + "/last", state)))
    grow = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    arrays = {name: state[name] for name in ("rows", "columns", "same")}
    with pj.Checkpoints(path + "/background", keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            pending = checkpoints.save_async(step, {"arrays": arrays, "numpy": state["numpy"]})
            state["numpy"] += 1
            arrays = grow(arrays)
        pending.result()
        checkpoints.save_async(3, {"arrays": arrays})
        found.append(refused(checkpoints.wait))
        found.append(checkpoints.steps())
        checkpoints.wait()
    pj.save_async(path + "/e", {"arrays": arrays} if rank else {"other": arrays})
    found.append(refused(lambda: pj.save(path + "/f", {"arrays": arrays})))
    pj.save_async(path + "/f", {"arrays": arrays})
    pj.wait()
    print(json.dumps(found))
    """
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        forks.WholeJaxPopen(
            ["-c", textwrap.dedent(script), str(tmp_path), str(port), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended[0][1] + ended[1][1]
    for rank, (out, _) in enumerate(ended):
        found = json.loads(out.splitlines()[-1])
        assert found[:3] == [2, rank, 7]
        assert found[3:12] == [True] * 5 + [7, True, True, True]
        exists, differs, other, code = found[12:16]
        assert "a complete checkpoint" in exists or "already" in exists
        assert "own is not the same in processes 0 and 1" in differs
        assert "only" in other
        assert "f: a value of type builtin_function_or_method" in code
        mismatch, both, onto_store, again, steps, failed = found[20:]
        assert found[16:20] == [None, 2, True, [2]]
        assert "own: shape (3,)" in mismatch
        assert mismatch.startswith("StateMismatchError" if rank else "RankError: process 1 cannot")
        assert both == [[*range(6)]] * 2
        assert "is a store" in onto_store
        assert "already" in again or "complete" in again
        assert steps == [2, 3]
        assert "nothing was committed" in failed
    loaded = penstock.load(tmp_path / "a")
    assert np.array_equal(loaded["columns"], np.arange(96.0).reshape(8, 12))
    assert penstock.verify(tmp_path / "a").ok
    background = penstock.CheckpointStore(tmp_path / "background").load()
    assert background["numpy"].tolist() == [2, 3, 4, 5]
    for array in background["arrays"].values():
        assert np.array_equal(array, np.arange(96.0).reshape(8, 12) + 2)
    assert (tmp_path / "f" / "manifest.json").exists()
    # The second process's useless files go with its next save there, or with a sweep.
    assert not any((tmp_path / name / "manifest.json").exists() for name in "bcd")


def test_it_works_without_torch(tmp_path):
    script = """
    import json, sys
    class Blocker:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torch":
                raise ModuleNotFoundError(f"No module named {name!r}", name="torch")
    sys.meta_path.insert(0, Blocker())
    import jax, jax.numpy as jnp
    from penstock.integrations import jax as pj
    state = {"w": jnp.ones(3, jnp.bfloat16), "key": jax.random.key(0), "step": 1}
    pj.save(sys.argv[1] + "/a", state)
    with pj.Checkpoints(sys.argv[1] + "/b") as checkpoints:
        checkpoints.save_async(1, state)
        step, loaded = checkpoints.resume(state)
    print(json.dumps([step, loaded["w"].tolist(), pj.load(sys.argv[1] + "/a", like=state)["step"],
                      "torch" in sys.modules]))
    """
    assert run(script, tmp_path) == [1, [1.0] * 3, 1, False]


@pytest.fixture
def newer(monkeypatch):
    """Pretends that a newer, untested JAX is installed."""
    found = versions.version
    monkeypatch.setattr(versions, "version", lambda name: "99.0" if name == "jax" else found(name))
    monkeypatch.setattr(versions, "_self_checked", set())


def saves(root):
    """Yields all ways to save a pytree."""
    yield lambda pytree: pj.save(root / "a", pytree)
    yield lambda pytree: pj.save_async(root / "b", pytree).result()
    yield lambda pytree: pj.Checkpoints(root / "c").save(1, pytree)
    yield lambda pytree: pj.Checkpoints(root / "d").save_async(1, pytree).result()


def test_a_newer_version_is_taken_after_a_tiny_pytree_has_come_back(tmp_path, monkeypatch, newer):
    tried = []
    trial = fitting._try_out
    monkeypatch.setattr(fitting, "_try_out", lambda: (tried.append(1), trial()))
    for save in saves(tmp_path):
        versions._self_checked.clear()
        for _ in range(2):
            with contextlib.suppress(CheckpointExistsError):
                save(training())
        assert versions._self_checked == {"jax"}
    assert len(tried) == 4
    assert equal(pj.load(tmp_path / "a", like=training()), training())


def test_a_newer_version_in_which_an_array_comes_back_otherwise_saves_nothing(
    tmp_path, monkeypatch, newer
):
    load = loading.load
    monkeypatch.setattr(
        loading, "load", lambda path, like: {**load(path, like=like), "weak": jnp.float32(0.5)}
    )
    for save in saves(tmp_path):
        with pytest.raises(MissingDependencyError, match=r"99\.0.*weak: .*otherwise"):
            save(training())
    assert os.listdir(tmp_path) == []
