"""Writes golden checkpoints: `make.py NAME...`; existing ones are never written again.

A version 1 writer wrote the files under `v1/`, which have to load forever. The states are
deterministic; only the id and the time in a checkpoint differ from one run to another. A new state
gets a new name, and an old one is never changed.
"""

from __future__ import annotations

import datetime as dt
import decimal
import pathlib
import struct
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import torch

VERSION = Path(__file__).parent / "v1"


def plain() -> Any:
    """Returns every tag of the tree for a plain value (6.1, 6.2)."""
    nan = struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0]
    return {
        "constants": [None, True, False],
        "ints": [0, -1, 2**53 - 1, -(2**53), 2**64, -(2**130)],
        "floats": [0.0, -0.0, 0.1, 1e16, 5e-324, float("inf"), float("-inf"), float("nan"), nan],
        "text": ["", "ünï 🦀", "\0\x7f\u2028", "\ud800 lone"],
        "bytes": [b"", b"\0\xff", bytearray(b"abc"), bytes(range(256)) * 17],
        "long bytearray": bytearray(bytes(range(256)) * 20),
        "complex": complex(-0.0, float("inf")),
        "tuple": (1, (2, ()), [3]),
        "sets": [{1, "a", (2, None)}, frozenset({b"x", 2.5}), set()],
        "keys": {1: "int", "1": "str", 1.5: 0, None: 0, False: 0, (1, ("a",)): 0, 2**60: 0},
        "dollar": {"$": "tensor", "i": 0},
        "ordered": OrderedDict([("z", 1), (3, OrderedDict())]),
        "counter": Counter({"a": 3, 2: -1}),
        "defaults": [defaultdict(list, {1: [2]}), defaultdict(None), defaultdict(dict)],
        "size": torch.Size([2, 0, 3]),
        "dtypes": [torch.float32, torch.bfloat16, np.dtype(">f8"), np.dtype("<U5")],
        "devices": [torch.device("cpu"), torch.device("cuda:1")],
        "scalars": [np.float32(0.1), np.uint64(2**64 - 1), np.bool_(True), np.str_("ab\0")],
        "times": [np.datetime64("2024-02-29T12:00:00"), np.timedelta64("NaT")],
        "slices": [slice(None), slice(1, -(2**60), None), range(5, -5, -3)],
    }


def typed() -> Any:
    """Returns values of the standard library (6.2)."""
    zone = dt.timezone(dt.timedelta(hours=-5, seconds=30), "there")
    return {
        "dates": [dt.date(1, 1, 1), dt.date(9999, 12, 31)],
        "times": [dt.time(), dt.time(23, 59, 59, 999999, fold=1), dt.time(1, tzinfo=dt.UTC)],
        "moments": [dt.datetime(2024, 2, 29, 12), dt.datetime(1, 1, 1, 0, 0, 0, 1, tzinfo=zone)],
        "spans": [dt.timedelta(), dt.timedelta(-1, 86399, 999999), dt.timedelta.max],
        "zones": [dt.UTC, zone, dt.timezone.min],
        "paths": [pathlib.Path("a/b"), pathlib.PureWindowsPath("c:/d"), pathlib.Path("\udcff")],
        "decimals": [decimal.Decimal(text) for text in ("-0.10", "1E+20", "NaN123", "-Infinity")],
        "uuid": uuid.UUID(int=2**127 + 1),
        "deques": [deque(), deque([1, (2,)], 5)],
    }


def composites() -> Any:
    """Returns tensors made of other tensors (6.9), some tied."""
    matrix = torch.arange(24.0).view(4, 6) * (torch.arange(24).view(4, 6) % 5 == 0)
    rows = [torch.arange(6.0).view(2, 3), torch.arange(3.0).view(1, 3)]
    twice = torch.sparse_coo_tensor(
        torch.tensor([[1, 1], [2, 2]]), torch.tensor([1.0, 2.0]), (4, 6)
    )
    return {
        "coo": [matrix.to_sparse(), twice, twice],
        "rows": [matrix.to_sparse_csr(), matrix.to_sparse_bsr((2, 3))],
        "columns": [matrix.to_sparse_csc(), matrix.to_sparse_bsc((2, 3))],
        "nested": torch.nested.nested_tensor(rows),
        "jagged": torch.nested.nested_tensor(rows, layout=torch.jagged),
    }


def tensors() -> Any:
    """Returns PyTorch's long-standing types, ties and views (4.2 to 4.5)."""
    names = (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    )
    return {"types": {name: pattern(name) for name in names}, "ties": ties()}


def pattern(name: str) -> torch.Tensor:
    """Returns ten elements of a type, with varied bits."""
    dtype = getattr(torch, name)
    count = 10 * torch.empty(0, dtype=dtype).element_size()
    data = [value % 2 if name == "bool" else value * 37 % 256 for value in range(count)]
    return torch.tensor(data, dtype=torch.uint8).view(dtype).reshape(2, 5)


def ties() -> Any:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    array = np.arange(10, dtype=np.int16)
    return {
        "base": base,
        "again": base,
        "transposed": base.t(),
        "row": base[2],
        "stepped": base[::2, 1::2],
        "expanded": base[1].expand(3, 6),
        "array": array,
        "backward": array[::-1],
        "as tensor": torch.from_numpy(array),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "not contiguous": torch.arange(20.0)[::3],
    }


def recent_types() -> Any:
    """Returns types of newer PyTorch versions."""
    return {name: pattern(name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2", "uint4", "int7")}


def arrays() -> Any:
    """Returns NumPy's own types (4.4)."""
    return {
        "big-endian": np.arange(5, dtype=">f4"),
        "text": np.array([["a", "ünï"]]),
        "bytes": np.array([b"abc", b"\0\xff"]),
        "void": np.array([b"ab"], "V2"),
        "time": np.array(["2024-02-29", "NaT"], "M8[ns]"),
        "span": np.array([5], "m8[25us]"),
        "complex": np.array([1 - 2j]),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.array(3, np.int8),
    }


def names() -> Any:
    """Returns names that collide, are empty, or have a meaning elsewhere (6.4)."""
    keys = ["a.b", "", "__metadata__", "\ud800", "../..", 'quo"te\\', "nul\0", "a.b~2", "1", 1]
    state: dict[Any, Any] = {key: torch.tensor([index]) for index, key in enumerate(keys)}
    return {**state, "a": {"b": torch.tensor([99])}}


def training() -> Any:
    """Returns a model and its optimizer; several shards cross pages and digest chunks."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    count = 0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 64)
            parameter.grad = torch.ones_like(parameter) / 128
            count += parameter.numel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-8)
    state = optimizer.state_dict()
    state["state"] = {
        index: {"step": torch.tensor(3.0), "exp_avg": parameter.grad.clone()}
        for index, parameter in enumerate(model.parameters())
    }
    chunks = (torch.arange(280_000) % 251).to(torch.float32)
    return {"model": model.state_dict(), "optimizer": state, "count": count, "chunks": chunks}


def linked() -> Any:
    """Returns tensors, some in a file that becomes part of the checkpoint by a link (5.5)."""
    moments = (torch.arange(300_000) % 241).to(torch.float32)
    state = {"weights": torch.arange(70.0), "moments": {0: moments, 1: pattern("bfloat16")}}
    return {**state, "again": moments, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}


def in_file(state: Any, path: Path) -> Any:
    """Returns a state with its tensors in a file."""
    from held_files import Held

    moments = state["moments"]
    labels = {"nobody's": torch.ones(5), "first": moments[0], "second": moments[1]}
    held = Held(path, {**labels, "scalar": state["scalar"], "empty": state["empty"]})
    first = held.tensor("first")
    found = {"moments": {0: first, 1: held.tensor("second")}, "again": first}
    return {**state, **found, "scalar": held.tensor("scalar"), "empty": held.tensor("empty")}


def grouped() -> Any:
    """Returns a model for shards of its own, with its index and files beside it (3.7, 5.6)."""
    torch.manual_seed(5)
    model = {f"module.layers.{index}.weight": torch.randn(20, 30) for index in range(5)}
    head = model["module.layers.0.weight"]
    average = {f"layers.{index}": torch.randn(7) for index in range(3)}
    return {"head": head, "model": model, "average": average, "optimizer": [torch.randn(9)]}


def leaf() -> Any:
    """Returns a state that is a single tensor (6.4)."""
    return torch.arange(3)


STATES = {
    "plain": plain,
    "typed": typed,
    "composites": composites,
    "tensors": tensors,
    "recent-types": recent_types,
    "arrays": arrays,
    "names": names,
    "training": training,
    "linked": linked,
    "grouped": grouped,
    "leaf": leaf,
}

SHARD_BYTES = {"training": 8192, "grouped": 6000}
SEALED = Path(__file__).parent / "sealed"
"""The sealed checkpoint; section 9 of the format is a part of version 1."""

SEALED_KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32
"""Its identity: a key file, whose wrap is AES key wrap. It protects nothing."""


def sealed() -> Any:
    """Returns a state of several shards, with a tensor of each kind of place."""
    return {
        "pages": torch.arange(4096, dtype=torch.int32).view(64, 64),
        "w": np.arange(6, dtype="float32").reshape(2, 3),
        "empty": torch.zeros(0, 3),
        "half": torch.arange(5).to(torch.bfloat16),
        "name": "golden",
        "step": 7,
    }


GIVEN = {
    "grouped": {
        "groups": {"model": "", "average": "ema"},
        "files": {"config.json": b"{}\n", "vocab.txt": b"a\nb\n"},
    }
}


def main() -> None:
    """Writes the named checkpoints that do not exist yet."""
    import penstock

    sys.path.append(str(Path(__file__).parent.parent / "python"))
    for name in sys.argv[1:]:
        if name == "sealed" and not SEALED.exists():
            penstock.save(
                SEALED,
                sealed(),
                step=7,
                metadata={"golden": name},
                options=penstock.Options(shard_bytes=8192),
                sealing=penstock.Sealing([SEALED_KEY]),
            )
            continue
        if (VERSION / name).exists():
            sys.exit(f"{VERSION / name} is there already: golden files never change")
        options = penstock.Options(shard_bytes=SHARD_BYTES.get(name))
        state = STATES[name]()
        if name == "linked":
            state = in_file(state, VERSION / "held")
        penstock.save(
            VERSION / name,
            state,
            step=7,
            metadata={"golden": name},
            options=options,
            **GIVEN.get(name, {}),
        )


if __name__ == "__main__":
    main()
