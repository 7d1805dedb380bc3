"""PyTorch's default device does not affect the tensors that the package makes for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import penstock
from penstock import features

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Makes "meta" the default device; a real device's memory would be written to."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("rows", [8, 8000])
def test_rows_come_to_the_host(tmp_path: Path, elsewhere: None, rows: int) -> None:
    content = torch.arange(16_000.0, device="cpu").view(1000, 16)
    ids = torch.arange(rows, device="cpu") % 1000
    features.write(tmp_path / "rows", content)
    with features.open(tmp_path / "rows", cache=features.Cache(1 << 20)) as table:
        for _ in range(2):
            assert torch.equal(table.gather(ids), content[ids])
    with features.Table.create(tmp_path / "t", 1000, {"w": (16, "float32")}) as changing:
        changing.update(ids, {"w": content[ids]})
        assert torch.equal(changing.lookup(ids)["w"], content[ids])


def test_a_checkpoint_comes_to_the_host(tmp_path: Path, elsewhere: None) -> None:
    state = {
        "some": torch.ones(3, device="cpu"),
        "none": torch.ones((0, 2), device="cpu"),
        "turned": torch.arange(6.0, device="cpu").view(2, 3).t(),
    }
    penstock.save(tmp_path / "a", state)
    found = penstock.load(tmp_path / "a")
    assert all(torch.equal(found[name], one) for name, one in state.items())


def test_batches_of_graphs_come_to_the_host(tmp_path: Path, elsewhere: None) -> None:
    pytest.importorskip("torch_geometric")
    from penstock.integrations.pyg import FeatureStore, GatherLoader, Graph

    generator = torch.Generator(device="cpu").manual_seed(1)
    edges = torch.randint(0, 100, (2, 600), generator=generator, device="cpu")
    content = torch.arange(400.0, device="cpu").view(100, 4)
    features.write(tmp_path / "x", content)
    with features.open(tmp_path / "x") as table:
        store = FeatureStore({"x": table, "y": torch.arange(100, device="cpu")})
        seeds = torch.arange(60, device="cpu")
        for shuffle in (False, True):
            loader = GatherLoader(
                store, Graph(edges, 100), [3, 2], seeds, batch_size=20, shuffle=shuffle
            )
            for batch in loader:
                assert torch.equal(batch.x, content[batch.n_id])
                assert batch.y.is_cpu
