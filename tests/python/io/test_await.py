"""Awaited transfers, in any number of event loops."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from penstock.errors import TransferCancelledError, TransferError
from penstock.offload import TensorIO

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.offload import Transfer, TransferReport


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(100_000))
    return path


async def _result(transfer: Transfer) -> TransferReport:
    return await transfer


def test_many_are_awaited_at_a_time(file: Path) -> None:
    content = file.read_bytes()

    async def main() -> None:
        async with TensorIO() as io:
            rows = [bytearray(500) for _ in range(300)]
            transfers = [io.read(row, file, 300 * i) for i, row in enumerate(rows)]
            reports = await asyncio.gather(*map(_result, transfers))
            assert [report.nbytes for report in reports] == [500] * 300
            assert all(row == content[300 * i :][:500] for i, row in enumerate(rows))
            # Awaiting an ended transfer returns at once.
            assert (await transfers[0]).nbytes == 500

    # A new loop each time, which may get the id of the previous one.
    for _ in range(3):
        asyncio.run(main())


def test_the_loop_goes_on_meanwhile(tmp_path: Path) -> None:
    async def main() -> None:
        async with TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096) as io:
            transfer = io.write(np.zeros(32 << 20, np.uint8), tmp_path / "file")
            task = asyncio.ensure_future(_result(transfer))
            turns = 0
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
            assert (await task).nbytes == 32 << 20
            assert turns > 1

    asyncio.run(main())


def test_an_error_is_raised_where_it_is_awaited(file: Path) -> None:
    async def main() -> None:
        async with TensorIO() as io:
            with pytest.raises(TransferError):
                await io.read(bytearray(10), file, 200_000)

    asyncio.run(main())


def test_an_error_that_nobody_awaited_comes_at_the_end(file: Path) -> None:
    async def main() -> None:
        async with TensorIO() as io:
            io.read(bytearray(10), file, 200_000)

    with pytest.raises(TransferError):
        asyncio.run(main())


def test_a_task_that_is_cancelled_gives_its_transfer_up(tmp_path: Path) -> None:
    async def main() -> None:
        io = TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096)
        transfer = io.write(np.zeros(256 << 20, np.uint8), tmp_path / "file")
        task = asyncio.ensure_future(_result(transfer))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TransferCancelledError):
            transfer.result(120)
        io.close()

    asyncio.run(main())


def test_a_block_whose_task_is_cancelled_is_closed(tmp_path: Path) -> None:
    content = np.full(32 << 20, 7, np.uint8)

    async def main() -> None:
        io = TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096)
        transfers = []

        async def block() -> None:
            async with io:
                transfers.append(io.write(content, tmp_path / "file"))

        task = asyncio.create_task(block())
        while not transfers:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ValueError, match="closed"):
            io.read(bytearray(10), tmp_path / "file")
        # The task was cancelled, not the transfer.
        assert (await transfers[0]).nbytes == content.nbytes

    asyncio.run(main())


def test_who_awaits_no_more_is_no_longer_told(file: Path) -> None:
    """An event loop without waiting tasks watches no descriptor of Penstock."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        before = len(loop._selector.get_map())  # type: ignore[attr-defined]
        async with TensorIO() as io:
            await asyncio.gather(*(_result(io.read(bytearray(10), file)) for _ in range(20)))
            assert len(loop._selector.get_map()) == before  # type: ignore[attr-defined]

    asyncio.run(main())
