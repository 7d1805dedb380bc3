"""Transfers when the interpreter exits, forks, is interrupted or drops them."""

from __future__ import annotations

import json
import os
import random
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np

import forks
from penstock.offload import TensorIO, Transfer, wait_all

HANG_SECONDS = 120
TRANSFERS = int(os.environ.get("PENSTOCK_TORTURE_TRANSFERS", "400"))
SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", time.time_ns() % 1_000_000_000))
RESIDENT_BYTES_MAX = 32 << 20


def _run(code: str, *arguments: object) -> tuple[str, str]:
    """Runs a program; returns its standard output and standard error."""
    done = forks.run(
        ["-c", textwrap.dedent(code), *map(str, arguments)],
        timeout=HANG_SECONDS,
        popen=forks.WholePopen,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_program_that_ends_finishes_what_it_has_handed_over(tmp_path: Path) -> None:
    _, said = _run(
        """
        import sys, numpy as np
        from penstock.offload import TensorIO
        def leave(path):
            TensorIO(io_threads=1, queue_depth=2, extent_bytes=4096).write(held, path)
        held = np.full(32 << 20, 7, np.uint8)
        leave(sys.argv[1])
        kept = TensorIO(extent_bytes=8192)
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


def test_a_child_of_multiprocessing_finishes_too(tmp_path: Path) -> None:
    """Children end without `atexit`, except spawned ones."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import multiprocessing, sys, numpy as np
        from penstock.offload import TensorIO
        def leave(path):
            held = np.full(32 << 20, 7, np.uint8)
            TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096).write(held, path)
            TensorIO().read(bytearray(10), path, 32 << 20)
        if __name__ == "__main__":
            TensorIO().write(b"of the parent", sys.argv[1] + "parent").result()
            for method in ("fork", "spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                child = context.Process(target=leave, args=(sys.argv[1] + method,))
                child.start()
                child.join()
                assert child.exitcode == 0, method
        """)
    )
    done = forks.run([str(program), f"{tmp_path}/"], timeout=HANG_SECONDS, popen=forks.WholePopen)
    assert done.returncode == 0, done.stderr
    for method in ("fork", "spawn", "forkserver"):
        content = np.fromfile(tmp_path / method, np.uint8)
        assert content.size == 32 << 20
        assert (content == 7).all(), method
    assert done.stderr.count("a transfer that nobody waited for failed") == 3


def test_who_reads_when_the_interpreter_is_taken_apart_is_told(tmp_path: Path) -> None:
    """Only that read raises."""
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    said, warned = _run(
        """
        import sys
        from penstock.offload import TensorIO
        class Late:
            def __init__(self):
                self.io = TensorIO()
                self.io.read(bytearray(10), sys.argv[1]).result()
            def __del__(self, path=sys.argv[1]):
                try:
                    self.io.read(bytearray(10), path).result()
                except Exception:
                    print("told")
        sys.modules["kept"] = Late()
        """,
        path,
    )
    assert said == "told\n"
    assert warned == ""


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


def test_a_fork_at_any_moment_has_workers_that_go_on(tmp_path: Path) -> None:
    """Also if a worker drops a tensor at that moment: the child inherits no held lock."""
    path = tmp_path / "file"
    path.write_bytes(random.Random(2).randbytes(1 << 20))
    said, _ = _run(
        """
        import os, sys
        import numpy as np
        from penstock.offload import TensorIO
        path, forks = sys.argv[1], int(sys.argv[2])
        io = TensorIO(io_threads=2, queue_depth=1, extent_bytes=16384)
        for number in range(forks):
            transfers = [io.read(np.empty(1000 + number, np.uint8), path) for _ in range(4)]
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    io.read(bytearray(100), path, number).result(30)
                    io.close()
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, number
            for transfer in transfers:
                transfer.result(30)
        print("fine")
        """,
        path,
        min(TRANSFERS // 8, 150),
    )
    assert said == "fine\n"


def test_waiting_can_be_interrupted(tmp_path: Path) -> None:
    said, _ = _run(
        """
        import signal, sys, numpy as np
        from penstock.offload import TensorIO
        io = TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096)
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
    """By a timeout, by a signal handler, and by Ctrl-C in a block."""
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
            io = TensorIO(io_threads=1, queue_depth=1, extent_bytes=4096)
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
            except penstock.errors.TransferError as error:
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
    handed: list[Transfer] = []

    def hand_over(io: TensorIO) -> None:
        try:
            while True:
                handed.append(io.read(bytearray(10), path))
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
    # Transfers submitted before the close are complete.
    wait_all(handed, HANG_SECONDS)


def test_transfers_that_are_cancelled_dropped_and_forked_over_leave_nothing(
    tmp_path: Path,
) -> None:
    """The program checks every byte, this test its resources: `make torture` does more."""
    done = forks.run(
        [str(Path(__file__).with_name("campaign.py")), str(tmp_path), str(TRANSFERS), str(SEED)],
        timeout=HANG_SECONDS + TRANSFERS,
        popen=forks.WholePopen,
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stderr}"
    told = json.loads(done.stdout)
    sys.stdout.write(f"seed {SEED}: {told}\n")
    before, after = told["before"], told["after"]
    for what in ("threads", "descriptors", "pinned_bytes"):
        assert after[what] <= before[what], told
    # The allocator's memory does not grow with the number of transfers.
    assert after["resident_bytes"] - before["resident_bytes"] < RESIDENT_BYTES_MAX, told
    assert len(told["ways"]) == 7
