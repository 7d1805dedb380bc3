"""What becomes of transfers when the interpreter ends, forks, is interrupted or lets them go."""

from __future__ import annotations

import os
import random
import textwrap
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import forks
import penstock
from penstock.offload import TensorIO

if TYPE_CHECKING:
    from pathlib import Path

HANG_SECONDS = 120


def _run(code: str, *arguments: object) -> tuple[str, str]:
    """What a program says, on standard output and on the other."""
    done = forks.run(
        ["-c", textwrap.dedent(code), *map(str, arguments)],
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_program_that_ends_finishes_what_it_has_handed_over(tmp_path: Path) -> None:
    _, said = _run(
        """
        import sys, numpy as np
        from penstock.offload import TensorIO
        def leave(path):
            TensorIO(workers=1, queue_depth=2, block_bytes=4096).write(held, path)
        held = np.full(32 << 20, 7, np.uint8)
        leave(sys.argv[1])
        kept = TensorIO(block_bytes=8192)
        transfer = kept.write(held, sys.argv[2])
        """,
        tmp_path / "left",
        tmp_path / "kept",
    )
    assert said == ""
    for name in ("left", "kept"):
        content = np.fromfile(tmp_path / name, np.uint8)
        assert content.size == 32 << 20
        assert (content == 7).all()


def test_a_program_that_ends_tells_of_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"short")
    for kept in ("io = TensorIO(); io", "TensorIO()"):
        _, said = _run(
            f"""
            import sys
            from penstock.offload import TensorIO
            {kept}.read(bytearray(10), sys.argv[1])
            """,
            path,
        )
        assert "a transfer that nobody waited for failed" in said
        assert str(path) in said


def test_a_fork_has_workers_of_its_own_and_no_transfer_of_its_parent(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(100_000))
    said, _ = _run(
        """
        import asyncio, os, sys, penstock
        from penstock.offload import TensorIO
        path = sys.argv[1]
        async def awaited():
            await transfer
        content = open(path, "rb").read()
        io = TensorIO()
        transfer = io.read(bytearray(50_000), path)
        child = os.fork()
        into = bytearray(1000)
        assert io.read(into, path, 5).result(60).nbytes == 1000
        assert into == content[5:1005]
        if child == 0:
            for call in (transfer.result, transfer.cancel, lambda: asyncio.run(awaited())):
                try:
                    call()
                except penstock.PenstockError as error:
                    assert "fork" in str(error), error
                else:
                    raise AssertionError
            assert not transfer.done()
            io.close()
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert transfer.result(60).nbytes == 50_000
        io.close()
        print("fine")
        """,
        path,
    )
    assert said == "fine\n"


def test_waiting_can_be_interrupted(tmp_path: Path) -> None:
    said, _ = _run(
        """
        import signal, sys, numpy as np
        from penstock.offload import TensorIO
        io = TensorIO(workers=1, queue_depth=1, block_bytes=4096)
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyError("heard")))
        transfer = io.write(np.zeros(1 << 30, np.uint8), sys.argv[1])
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            transfer.result()
        except KeyError:
            print("heard", transfer.done())
        transfer.cancel()
        """,
        tmp_path / "file",
    )
    assert said == "heard False\n"


def test_a_failure_is_heard_of_though_waiting_was_broken_off(tmp_path: Path) -> None:
    """By a time-out, by the handler of a signal, and in a block that Ctrl-C ended."""
    path = tmp_path / "short"
    path.write_bytes(b"short")
    said, warned = _run(
        """
        import signal, sys, numpy as np, penstock
        from penstock.offload import TensorIO, wait_all
        short, path = sys.argv[1:]
        content = np.zeros(32 << 20, np.uint8)
        def heard(*_):
            raise TimeoutError("the handler's")
        signal.signal(signal.SIGALRM, heard)
        def begin():
            io = TensorIO(workers=1, queue_depth=1, block_bytes=4096)
            failed = io.read(bytearray(10), short)
            while not failed.done():
                pass
            return io, failed, io.write(content, path)
        for wait in (lambda io: io.wait(0), lambda io: wait_all([slow], 100), lambda io: io.wait()):
            io, failed, slow = begin()
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                wait(io)
            except TimeoutError as error:
                signal.setitimer(signal.ITIMER_REAL, 0)
                print(error)
            failed.cancel()
            slow.cancel()
            try:
                io.close()
            except penstock.TransferError as error:
                print(error.path == short)
        io, failed, slow = begin()
        del failed, slow
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with io:
                pass
        except KeyboardInterrupt:
            print("interrupted")
        del io
        """,
        path,
        tmp_path / "file",
    )
    assert said.splitlines() == [
        "not all transfers have ended in 0 s",
        "True",
        "the handler's",
        "True",
        "the handler's",
        "True",
        "interrupted",
    ]
    assert warned.count("a transfer that nobody waited for failed") == 1


def test_a_thread_that_hands_over_while_another_closes_is_told(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    told: list[type[Exception]] = []

    def hand_over(io: TensorIO) -> None:
        try:
            while True:
                io.read(bytearray(10), path)
        except Exception as error:
            told.append(type(error))

    for _ in range(50):
        io = TensorIO()
        threads = [threading.Thread(target=hand_over, args=(io,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        closing = [threading.Thread(target=io.close) for _ in range(2)]
        for thread in closing:
            thread.start()
        for thread in threads + closing:
            thread.join(HANG_SECONDS)
    assert told == [ValueError] * 150


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_transfers_that_are_cancelled_dropped_and_forked_over_leave_nothing(
    tmp_path: Path,
) -> None:
    """The memory is the caller's again, with the right bytes or those that were there."""
    drawn = random.Random(5)
    path = tmp_path / "file"
    content = drawn.randbytes(1 << 20)
    path.write_bytes(content)
    before = None
    io = TensorIO(block_bytes=16384)
    for turn in range(400):
        offset, nbytes = drawn.randrange(1 << 19), drawn.randrange(1 << 17)
        into = np.zeros(nbytes, np.uint8)
        transfer = io.read(into, path, offset)
        match drawn.randrange(8):
            case 0:
                transfer.cancel()
            case 1:
                del transfer
            case 2 if turn % 16 == 0:
                child = os.fork()
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)
            case 3:
                io.close()
                io = TensorIO(block_bytes=16384)
            case _:
                assert transfer.result(HANG_SECONDS).nbytes == nbytes
                assert into.tobytes() == content[offset : offset + nbytes]
        if turn == 100:
            before = _threads(), _descriptors()
    try:
        io.close()
    except penstock.TransferCancelledError:
        pytest.fail("what was given up on purpose is no news")
    after = _threads(), _descriptors()
    assert before is not None
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 2
    assert threading.active_count() == 1
