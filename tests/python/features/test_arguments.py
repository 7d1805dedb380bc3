"""Invalid arguments are refused by name, before anything is opened or created."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock import features, offload
from penstock.errors import MissingDependencyError, UnsupportedStateError

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = {"w": (2, "float32")}
ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    features.write(tmp_path / "written", ROWS)
    return tmp_path / "written"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("key", 5),
        ("key", b"features"),
        ("shape", 5),
        ("shape", ("a", 2)),
        ("dtype", torch.ones(2)),
        ("cache", 5),
        ("gap_bytes", "a"),
        ("io", 5),
    ],
)
def test_open(written: Path, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}="):
        features.open(written, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("metadata", [1]),
        ("metadata", 5),
        ("shape", 5),
        ("dtype", 5),
        ("key", 5),
        ("options", torch.ones(2)),
        ("progress", 5),
    ],
)
def test_write(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}="):
        features.write(tmp_path / "a", ROWS, **{name: value})
    assert not (tmp_path / "a" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("columns", [("w", (2, "float32"))]),
        ("rows", "a"),
        ("rows", 2.5),
        ("init", 5),
        ("cache", 5),
        ("compaction_bytes", "a"),
        ("io", 5),
    ],
)
def test_a_table_is_not_made(tmp_path: Path, name: str, value: Any) -> None:
    said = {"rows": 3, "columns": COLUMNS, name: value}
    with pytest.raises((TypeError, ValueError), match=f"^{name}[=:]"):
        features.Table.create(tmp_path / "a", **said)
    features.Table.create(tmp_path / "a", 3, COLUMNS).close()


def test_a_table(tmp_path: Path) -> None:
    features.Table.create(tmp_path / "a", 3, COLUMNS).close()
    for said in ({"cache": 5}, {"io": 5}):
        with pytest.raises(TypeError, match=f"^{next(iter(said))}="):
            features.Table(tmp_path / "a", **said)
    with features.Table(tmp_path / "a") as table:
        for rows in (5, [1], torch.ones(2)):
            with pytest.raises(TypeError, match=r"^rows: .*mapping of w"):
                table.update([1], rows)
        with pytest.raises(TypeError, match=r"^metadata="):
            table.snapshot(tmp_path / "b", metadata=[1])


def test_streams(written: Path) -> None:
    with features.open(written) as table:
        with pytest.raises(TypeError, match=r"^batches="):
            list(table.stream(5))
        with pytest.raises(TypeError, match=r"^window="):
            list(table.stream([[1]], window=None))
    for said in ({"top": "a"}, {"nodes": 2.5}):
        with pytest.raises(TypeError, match=f"^{next(iter(said))}="):
            features.rank(by="degree", colptr=[0, 1], row=[0], **said)
    with pytest.raises(TypeError, match=r"^damping="):
        features.rank(by="reverse_pagerank", colptr=[0, 1], row=[0], damping="a")
    for said in ({"io": 5}, {"key": 5}, {"blocks": 5}):
        with pytest.raises(TypeError, match=f"^{next(iter(said))}="):
            offload.stream(torch.nn.Linear(1, 1), weights=written, memory_bytes=1, **said)


def odd_tensors() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": torch.eye(2).to_sparse(),
            "sparse csr": torch.eye(2).to_sparse_csr(),
            "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
            "nested jagged": torch.nested.nested_tensor(
                [torch.ones(1), torch.ones(2)], layout=torch.jagged
            ),
            "meta": torch.empty(2, 2, device="meta"),
            "quantized": torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        }


@pytest.mark.parametrize("kind", odd_tensors())
def test_tensors_without_plain_memory(written: Path, tmp_path: Path, kind: str) -> None:
    value = odd_tensors()[kind]
    for rows in (value, [value]):
        with pytest.raises(UnsupportedStateError, match=f"{kind.split()[0]}.*: "):
            features.write(tmp_path / "a", rows)
    with (
        features.Table.create(tmp_path / "t", 2, COLUMNS) as table,
        pytest.raises(UnsupportedStateError, match="'w'"),
    ):
        table.update([0, 1], {"w": value})
    with features.open(written) as table:
        with pytest.raises(ValueError, match=r"^out: "):
            table.gather([0, 1], out=value)
        for call in (table.gather, table.hint):
            with pytest.raises((TypeError, UnsupportedStateError), match=r"^ids: "):
                call(value)


def test_ids_of_several_lengths(written: Path) -> None:
    with features.open(written) as table, pytest.raises(TypeError, match=r"^ids: .*lengths"):
        table.gather([[1], [2, 3]])


def test_a_single_element_may_have_any_stride(tmp_path: Path) -> None:
    """PyTorch calls it contiguous, but cannot view its bytes."""
    features.write(tmp_path / "a", torch.full((4, 8), 3.0)[:1, ::8])
    with features.open(tmp_path / "a") as table:
        assert table.gather([0]).tolist() == [[3.0]]
    weight = torch.nn.Parameter(torch.full((4, 8), 2.0, dtype=torch.bfloat16)[:1, ::8])
    optimizer = offload.AdamW([weight], lr=0.1, directory=tmp_path / "o", masters=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.close()
    again = torch.nn.Parameter(torch.zeros((4, 8), dtype=torch.bfloat16)[:1, ::8])
    other = offload.AdamW([again], lr=0.1, directory=tmp_path / "o", masters=True)
    assert other.recover()
    other.close()
    assert again.item() == weight.item()


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no float4")
def test_a_type_that_numpy_lacks_is_gathered_by_a_tensor(tmp_path: Path) -> None:
    rows = torch.arange(12, dtype=torch.uint8).reshape(6, 2).view(torch.float4_e2m1fn_x2)
    features.write(tmp_path / "a", rows)
    with features.open(tmp_path / "a") as table:
        with pytest.raises(MissingDependencyError, match="pass ids as a tensor"):
            table.gather([0])
        found = table.gather(torch.tensor([5]))
        assert found.view(torch.uint8).tolist() == [[10, 11]]
        assert table.gather([5], device="cpu").dtype == rows.dtype
