"""`penstock.integrations.megatron`: unusual states, loads in parallel, and a full disk."""

from __future__ import annotations

import errno
import os

import pytest
import torch
import torch.distributed as dist

megatron = pytest.importorskip("megatron.core.dist_checkpointing")

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies.fully_parallel import (  # noqa: E402
    FullyParallelLoadStrategyWrapper,
)

import penstock  # noqa: E402
from conftest import mounted  # noqa: E402
from megatrons import assert_loaded, load, on_cpu, save, state  # noqa: E402
from penstock.errors import StorageError  # noqa: E402
from penstock.integrations.megatron import LoadStrategy, enable  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


def eight_bits(is_blank):
    """Tensors of all bit patterns of each 8-bit type, cut by the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    part = whole.narrow(0, rank * 8 // size, 8 // size)
    return {
        str(dtype): ShardedTensor.from_rank_offsets(
            f"w.{dtype}", (part * (not is_blank)).view(dtype), (0, rank, size)
        )
        for dtype in EIGHT_BITS
    }


def save_eight_bits(path):
    with enable():
        save(eight_bits(False), path)
        check_eight_bits(load(eight_bits(True), path))


def load_eight_bits(path):
    with enable():
        check_eight_bits(load(eight_bits(True), path))


def check_eight_bits(found):
    for name, sharded in eight_bits(False).items():
        assert found[name].dtype == sharded.data.dtype
        assert torch.equal(found[name].view(torch.uint8), sharded.data.view(torch.uint8))


def test_tensors_of_eight_bits_keep_every_bit(jobs, disk_path):
    path = disk_path / "iter_0000001"
    jobs.of(2).call(save_eight_bits, path)
    jobs.of(1).call(load_eight_bits, path)


def load_in_parallel(path):
    on_cpu()
    with enable():
        save(state(1), path)
        # The other ways to exchange tensors take a GPU.
        one = FullyParallelLoadStrategyWrapper(LoadStrategy(), exchange_algo="gather_object")
        assert_loaded(load(state(1, is_blank=True), path, one, strict="raise_unexpected"), 1)


def test_ranks_read_a_share_each_and_exchange_it(jobs, disk_path):
    jobs.of(2).call(load_in_parallel, disk_path / "iter_0000001")


def fill_the_disk(root, is_async):
    """A good save, and one that the disk has no room for."""
    on_cpu()
    rank, size = dist.get_rank(), dist.get_world_size()

    def rows(value, count):
        tensor = torch.full((count, 1 << 10), value)
        return {"w": ShardedTensor.from_rank_offsets("w", tensor, (0, rank, size))}

    with enable():
        save(rows(1.0, 64), root / "iter_0000001")
        try:
            request = save(rows(2.0, 4096), root / "iter_0000002", async_sharded_save=is_async)
            if is_async:
                request.async_fn(*request.async_fn_args)
                for finish in request.finalize_fns:
                    finish()
        except penstock.PenstockError as error:
            assert load(rows(0.0, 64), root / "iter_0000001")["w"].eq(1).all()
            return type(error), getattr(error, "errno", None), str(error)
    return None


@pytest.mark.parametrize("is_async", [False, True])
def test_a_full_disk_fails_the_save_on_all_ranks_and_keeps_the_one_before(jobs, tmp_path, is_async):
    with mounted("tmpfs", tmp_path / "small", 16 << 20) as root:
        found = jobs.of(2).call(fill_the_disk, root, is_async)
        assert any(kind is StorageError and code == errno.ENOSPC for kind, code, _ in found)
        assert all("pace" in said for _, _, said in found)
        assert not (root / "iter_0000002" / "manifest.json").exists()
        assert not [name for name in os.listdir(root / "iter_0000002") if "shard" in name]
        assert penstock.verify(root / "iter_0000001").ok


def load_dropped(path):
    if dist.get_rank() == 0:
        path.mkdir()
        (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
        torch.save({}, path / "common.pt")
    dist.barrier()
    with enable(), pytest.raises(Exception, match="zarr"):
        load({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2))}, path)


def test_a_format_without_a_reader_is_named(jobs, disk_path):
    jobs.of(2).call(load_dropped, disk_path / "iter_0000001")
