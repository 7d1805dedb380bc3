"""DeepSpeed's ops on Penstock: results, errors, and their installation in every process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import forks
import penstock
from penstock.errors import PenstockWarning, TransferError
from penstock.integrations import deepspeed
from penstock.integrations.deepspeed import ops
from penstock.integrations.deepspeed.variables import environment

if TYPE_CHECKING:
    from collections.abc import Iterator

HANG_SECONDS = 300
MIB = 1 << 20

aio = ops.module("async_io")


@pytest.fixture(params=["aio", "gds"])
def handle(request: pytest.FixtureRequest) -> Any:
    """A handle with small blocks, so that a tensor takes several."""
    if request.param == "gds":
        return ops.module("gds").gds_handle(4096, 4, False, True, 2)
    return aio.aio_handle(4096, 4, False, True, 2)


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `enable(strict=False)`."""
    for name, value in environment({}, strict=False).items():
        if name != "PYTHONPATH":
            monkeypatch.setenv(name, value)


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.arange(50_000, dtype=torch.int32)


@pytest.fixture
def file(tmp_path: Path, tensor: torch.Tensor) -> str:
    path = tmp_path / "tensor"
    path.write_bytes(tensor.numpy().tobytes())
    return str(path)


def test_a_handle_has_their_defaults_and_says_what_it_was_given() -> None:
    plain = aio.aio_handle()
    assert _settings(plain) == (1 << 20, 128, False, False, 1)
    assert plain.get_alignment() == 512
    given = aio.aio_handle(1000, 3, True, True, 2)
    assert _settings(given) == (1000, 3, True, True, 2)
    assert given.get_alignment() == 1024
    keywords = aio.aio_handle(block_size=4096, queue_depth=2, intra_op_parallelism=3)
    assert _settings(keywords) == (4096, 2, False, False, 3)


def _settings(handle: Any) -> tuple[int, int, bool, bool, int]:
    return (
        handle.get_block_size(),
        handle.get_queue_depth(),
        handle.get_single_submit(),
        handle.get_overlap_events(),
        handle.get_intra_op_parallelism(),
    )


def test_every_way_to_write_and_to_read(tmp_path: Path, handle: Any, tensor: torch.Tensor) -> None:
    path = str(tmp_path / "tensor")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    try:
        writes = [
            lambda: handle.write(tensor, path, True),
            lambda: handle.pwrite(tensor, path, False, False) - 1,
            lambda: handle.pwrite(tensor, path, False, True, 0),
            lambda: handle.pwrite(tensor, path, validate=True, **{"async": True}),
            lambda: handle.pwrite(buffer=tensor, filename=path, validate=False, **{"async": True}),
            lambda: handle.sync_pwrite(tensor, path) - 1,
            lambda: handle.sync_pwrite(tensor, path, 0) - 1,
            lambda: handle.async_pwrite(tensor, path),
            lambda: handle.async_pwrite(tensor, path, 0),
            lambda: handle.async_pwrite(tensor, fd, 0),
            lambda: handle.async_pwrite(buffer=tensor, fd=fd, file_offset=0),
            lambda: handle.async_pwrite(buffer=tensor, filename=path),
        ]
        reads = [
            lambda into: handle.read(into, path, True),
            lambda into: handle.read(into, path, validate=False, file_offset=0),
            lambda into: handle.pread(into, path, True, False) - 1,
            lambda into: handle.pread(into, path, False, True),
            lambda into: handle.pread(into, path, False, file_offset=0, **{"async": True}),
            lambda into: handle.sync_pread(into, path) - 1,
            lambda into: handle.async_pread(into, path, file_offset=0),
        ]
        pending = {2, 3, 4, 7, 8, 9, 10, 11}
        for number, write in enumerate(writes):
            Path(path).write_bytes(b"")
            assert write() == 0
            if number in pending:
                assert handle.wait() == 1
            assert Path(path).read_bytes() == tensor.numpy().tobytes()
        for number, read in enumerate(reads):
            into = torch.zeros_like(tensor)
            assert read(into) == 0
            if number in {3, 4, 6}:
                assert handle.wait() == 1
            assert torch.equal(into, tensor)
    finally:
        os.close(fd)


def test_offsets_and_many_at_a_time(handle: Any, file: str, tensor: torch.Tensor) -> None:
    parts = [torch.zeros(1000, dtype=torch.int32) for _ in range(50)]
    for number, part in enumerate(parts):
        assert handle.async_pread(part, file, 4000 * number) == 0
    assert handle.wait() == 50
    assert torch.equal(torch.cat(parts), tensor)
    assert handle.async_pwrite(parts[3], file, 4) == 0
    # As in DeepSpeed: a waiting call also waits for operations begun before it.
    assert handle.sync_pwrite(parts[3], file, 100_001) == 2
    content = bytearray(tensor.numpy().tobytes())
    content[4:4004] = content[100_001:104_001] = parts[3].numpy().tobytes()
    assert Path(file).read_bytes() == content


def test_strided_and_empty_tensors(tmp_path: Path, handle: Any) -> None:
    path = str(tmp_path / "tensor")
    matrix = torch.randn(100, 70)
    assert handle.sync_pwrite(matrix.t(), path) == 1
    into = torch.zeros(100, 140)[:, ::2].t()
    assert handle.read(into, path, True) == 0
    assert torch.equal(into, matrix.t())
    assert handle.sync_pread(torch.empty(0), path) == 1


def test_functions_of_the_module(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = str(tmp_path / "tensor")
    assert aio.aio_write(tensor, path, 4096, 8, False, True, True) == 0
    into = torch.zeros_like(tensor)
    assert aio.aio_read(into, path, 4096, 8, False, True, True) == 0
    assert torch.equal(into, tensor)
    assert aio.deepspeed_memcpy(into, tensor + 1) == 0
    assert torch.equal(into, tensor + 1)


def test_what_is_wrong_raises(tmp_path: Path, handle: Any, file: str, tensor: torch.Tensor) -> None:
    gone = str(tmp_path / "gone")
    calls: list[Any] = [
        lambda: handle.read(tensor, gone, False),
        lambda: handle.read(tensor[:100], file, False),
        lambda: handle.pread(tensor, gone, False, True),
        lambda: handle.sync_pread(tensor, file, 4),
        lambda: handle.async_pwrite(tensor, str(tmp_path)),
        lambda: handle.wait(),
    ]
    for call in calls:
        with pytest.raises(penstock.PenstockError):
            call()
    with pytest.raises(TypeError, match="filename or an fd"):
        handle.async_pwrite(tensor)
    for arguments, keywords in [((), {}), ((True, 0, 1), {}), ((True,), {"async": True})]:
        with pytest.raises(TypeError, match="the arguments are"):
            handle.pread(tensor, file, False, *arguments, **keywords)
    # No failed call leaves an operation to wait for.
    with pytest.raises(penstock.PenstockError, match="without an operation"):
        handle.wait()


def test_all_that_fails_is_told_and_all_has_ended(
    handle: Any, file: str, tensor: torch.Tensor
) -> None:
    into = torch.zeros_like(tensor)
    handle.async_pread(torch.empty(10), file, 200_000)
    handle.async_pread(into, file)
    handle.async_pread(torch.empty(10), file, 199_980)
    with pytest.raises(TransferError, match="another one") as caught:
        handle.wait()
    assert caught.value.path == file
    assert torch.equal(into, tensor)


def test_who_waits_goes_on_when_all_is_there_whichever_thread_waited(
    tmp_path: Path, lenient: None, tensor: torch.Tensor, file: str
) -> None:
    """DeepSpeed's ops hold a lock while waiting: threads share handles."""
    handle = aio.aio_handle(4096, 1)
    slow = tmp_path / "slow"
    slow.write_bytes(b"\x07" * (64 * MIB))
    into, again = torch.zeros(64 * MIB, dtype=torch.uint8), torch.zeros_like(tensor)
    handle.async_pread(into, str(slow))
    other = threading.Thread(target=handle.sync_pread, args=(again, file))
    other.start()
    while handle._pending:
        pass
    handle.wait()
    assert int((into != 7).sum()) == 0
    other.join(HANG_SECONDS)
    assert torch.equal(again, tensor)


@pytest.mark.slow
def test_a_fork_does_not_wait_for_who_waits_in_its_parent(tmp_path: Path, file: str) -> None:
    slow = tmp_path / "slow"
    slow.write_bytes(bytes(64 * MIB))
    code = """
        import os, signal, sys, threading, torch
        from penstock.integrations.deepspeed import ops
        slow, file = sys.argv[1:]
        handle = ops.module("async_io").aio_handle(4096, 1)
        handle.async_pread(torch.zeros(64 << 20, dtype=torch.uint8), slow)
        other = threading.Thread(target=handle.wait)
        other.start()
        while handle._pending:
            pass
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(handle.sync_pread(torch.zeros(10), file))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        other.join()
    """
    done = forks.run(["-c", textwrap.dedent(code), str(slow), file], timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr


def test_what_a_signal_broke_off_is_waited_for_again(tmp_path: Path) -> None:
    handle = aio.aio_handle(4096, 1)
    content = torch.full((32 * MIB,), 7, dtype=torch.uint8)

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(2):
            handle.async_pwrite(content, str(tmp_path / f"file{number}"))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(InterruptedError):
            handle.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert handle.wait() == 2
    for number in range(2):
        assert (tmp_path / f"file{number}").read_bytes() == b"\x07" * (32 * MIB)


def test_numbers_of_numpy_are_numbers(file: str, tensor: torch.Tensor) -> None:
    """As in DeepSpeed: programs compute offsets and sizes with them."""
    handle = aio.aio_handle(np.int64(4096), np.int32(4), False, True, np.int64(2))
    into = torch.zeros(10, dtype=torch.int32)
    assert handle.sync_pread(into, file, np.int64(400)) == 1
    assert torch.equal(into, tensor[100:110])
    assert handle.pread(into, file, False, False, np.uint32(4)) == 1
    assert torch.equal(into, tensor[1:11])
    assert handle.new_cpu_locked_tensor(np.int64(5), tensor).shape == (5,)


@pytest.mark.usefixtures("lenient")
def test_lenient_calls_return_what_theirs_do(
    tmp_path: Path, handle: Any, file: str, tensor: torch.Tensor
) -> None:
    gone = str(tmp_path / "gone")
    assert handle.read(tensor, gone, False) == -1
    assert handle.read(tensor[:100], file, False) == -1
    assert handle.pread(tensor, gone, False, True) == -1
    assert handle.wait() == 0
    assert handle.async_pread(tensor, file, 4) == 0
    with pytest.warns(PenstockWarning, match="ends"):
        assert handle.wait() == 1


def test_validate_compares_with_what_is_stored(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = str(tmp_path / "tensor")
    handle = aio.aio_handle()
    handle.sync_pwrite(tensor, path)
    handle.pread(tensor, path, True, True)
    # The stored bytes change between the read and its check.
    wrong = tensor.clone()
    wrong[-1] += 1
    while not handle._pending[0].transfer.done():
        pass
    Path(path).write_bytes(wrong.numpy().tobytes())
    with pytest.raises(penstock.PenstockError, match="not what was moved"):
        handle.wait()


def test_validate_takes_any_layout(tmp_path: Path, handle: Any) -> None:
    complex_ones = torch.randn(10, dtype=torch.complex64)
    tensors = complex_ones.conj(), complex_ones.conj().imag, torch.randn(1).expand(1, 5).T
    for number, tensor in enumerate(tensors):
        path = tmp_path / str(number)
        assert handle.pwrite(tensor, str(path), True, False) == 1
        assert path.read_bytes() == tensor.resolve_neg().numpy(force=True).tobytes()


def test_what_fails_behind_a_transfer_fails_once(
    tmp_path: Path, handle: Any, monkeypatch: pytest.MonkeyPatch, tensor: torch.Tensor
) -> None:
    """Like a copy to a device."""

    def fail(*_: object) -> None:
        raise RuntimeError("of a device")

    monkeypatch.setattr(ops, "_compare", fail)
    handle.pwrite(tensor, str(tmp_path / "validated"), True, True)
    handle.pwrite(tensor, str(tmp_path / "plain"), False, True)
    with pytest.raises(RuntimeError, match="of a device"):
        handle.wait()
    assert (tmp_path / "plain").read_bytes() == tensor.numpy().tobytes()
    assert handle.sync_pwrite(tensor, str(tmp_path / "plain")) == 1


def test_locked_tensors(handle: Any) -> None:
    like = torch.empty(0, dtype=torch.float16)
    locked = handle.new_cpu_locked_tensor(1000, like)
    assert (locked.shape, locked.dtype, locked.device) == ((1000,), torch.float16, like.device)
    assert locked.data_ptr() % 4096 == 0
    pin = ops.module("pin_memory").pin_handle()
    for one in (handle, pin):
        assert one.is_pinned(locked)
        assert one.is_pinned(locked[10:20])
        assert not one.is_pinned(torch.empty(1000))
    # A view beyond the tensor's end.
    beyond = locked.as_strided((1000,), (1,))
    assert handle.is_pinned(beyond)
    assert pin.free_cpu_locked_tensor(locked)
    assert not handle.is_pinned(locked)
    assert not handle.free_cpu_locked_tensor(locked)
    # The memory stays valid.
    assert torch.equal(locked.fill_(3), torch.full((1000,), 3, dtype=torch.float16))
    other = pin.new_cpu_locked_tensor(num_elem=10, example_tensor=like)
    assert pin.free_cpu_locked_tensor_by_ptr(other.data_ptr())
    assert not pin.free_cpu_locked_tensor_by_ptr(other.data_ptr())


def test_tensors_of_devices_by_gds() -> None:
    handle = ops.module("gds").gds_handle()
    tensor = handle.new_pinned_device_tensor(10, torch.empty(0, dtype=torch.int8))
    assert (tensor.shape, tensor.dtype) == ((10,), torch.int8)
    assert handle.pin_device_tensor(tensor)
    assert handle.unpin_device_tensor(tensor)
    assert handle.free_pinned_device_tensor(tensor)


class _OfADevice(torch.Tensor):
    """A tensor that claims to be on a device: there is none here."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = torch.device("cuda")  # type: ignore[assignment]


@pytest.mark.parametrize("mode", ["plain", "parameter", "inference"])
def test_a_tensor_of_a_device_is_filled_whatever_autograd_thinks_of_it(
    mode: str, handle: Any, file: str, tensor: torch.Tensor
) -> None:
    with torch.inference_mode(mode == "inference"):
        into = torch.zeros(tensor.numel()).as_subclass(_OfADevice)
        into.requires_grad_(mode == "parameter")
    assert handle.pread(into, file, True, False) == 1
    assert torch.equal(into.detach().as_subclass(torch.Tensor).view(torch.int32), tensor)


# ---- DeepSpeed itself


def _run(
    code: str, *arguments: object, command: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program from a file of its own, which `spawn` can import."""
    directory = Path(str(arguments[0]))
    program = directory / "program.py"
    program.write_text(textwrap.dedent(code))
    return subprocess.run(
        [*command, sys.executable, str(program), *map(str, arguments)],
        env={**os.environ, "DS_ACCELERATOR": "cpu", **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        cwd=directory,
    )


@pytest.mark.slow
def test_deepspeed_has_our_ops_in_every_process(tmp_path: Path) -> None:
    """Also in its children of both start methods."""
    done = _run(
        """
        import multiprocessing, sys

        def look(directory):
            import torch
            from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
            import deepspeed
            # Their own finding out would compile a probe.
            assert deepspeed.ops.__compatible_ops__["async_io"]
            for builder in (AsyncIOBuilder, PinMemoryBuilder):
                assert builder().is_compatible()
                assert "by Penstock" in builder().load().__doc__, builder
            handle = AsyncIOBuilder().load().aio_handle()
            tensor = torch.arange(1000)
            assert handle.sync_pwrite(tensor, directory + "/tensor") == 1
            return handle.sync_pread(torch.zeros(1000), directory + "/tensor")

        if __name__ == "__main__":
            from penstock.integrations import deepspeed as ours
            ours.enable()
            for method in ("spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    assert pool.apply(look, (sys.argv[1],)) == 1
            print("all of them")
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all of them\n")


@pytest.mark.slow
def test_a_whole_program_by_the_command(tmp_path: Path) -> None:
    """DeepSpeed's file writer and swapper, unchanged; and a foreign `sitecustomize`."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.of_somebody_else = True\n")
    done = _run(
        """
        import sys
        from pathlib import Path
        from types import SimpleNamespace
        import torch
        from deepspeed.io import fast_file_writer
        from deepspeed.io import FastFileWriter, FastFileWriterConfig
        from deepspeed.ops.op_builder import AsyncIOBuilder, PinMemoryBuilder
        from deepspeed.runtime.swap_tensor.utils import swap_in_tensors, swap_out_tensors

        assert sys.of_somebody_else
        directory = Path(sys.argv[1])
        handle = AsyncIOBuilder().load().aio_handle(block_size=1 << 20, queue_depth=8)
        # Another op, which their backend of the CPU lacks.
        bytes_of = SimpleNamespace(cast_to_byte_tensor=lambda one: one.view(-1).view(torch.uint8))
        fast_file_writer.UtilsBuilder = lambda: SimpleNamespace(load=lambda: bytes_of)
        pin = PinMemoryBuilder().load().pin_handle()
        pinned = pin.new_cpu_locked_tensor(8 << 20, torch.empty(0, dtype=torch.uint8))
        config = FastFileWriterConfig(
            dnvme_handle=handle, pinned_tensor=pinned, double_buffer=True,
            num_parallel_writers=1, writer_rank=0,
        )
        state = {"weights": torch.randn(1_234_567), "name": "of a model"}
        writer = FastFileWriter(file_path=str(directory / "state.pt"), config=config)
        torch.save(state, writer, _use_new_zipfile_serialization=False)
        writer.close()
        again = torch.load(directory / "state.pt")
        assert torch.equal(again["weights"], state["weights"])
        assert again["name"] == "of a model"

        buffers = [torch.randn(1 << 18) for _ in range(3)]
        paths = [str(directory / f"{number}.swp") for number in range(3)]
        swap_out_tensors(handle, buffers, paths)
        assert handle.wait() == 3
        into = [torch.zeros(1 << 18) for _ in range(3)]
        swap_in_tensors(handle, into, paths)
        assert handle.wait() == 3
        assert all(map(torch.equal, into, buffers))
        print("all of it")
        """,
        tmp_path,
        command=(str(Path(sys.executable).with_name("penstock")), "deepspeed", "--"),
        PYTHONPATH=str(tmp_path / "site"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all of it\n")


@pytest.mark.slow
def test_ds_io_runs_without_libaio(tmp_path: Path) -> None:
    """It spawns the processes that do the I/O."""
    command = [
        *(str(Path(sys.executable).with_name("penstock")), "deepspeed", "--"),
        *(str(Path(sys.executable).with_name("ds_io")), "--engine", "aio_handle"),
        *("--io_size", "4M", "--block_size", "1M", "--loops", "2", "--read", "--validate"),
        *("--folder_to_device_mapping", f"{tmp_path}:0"),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert "E2E Read" in done.stdout


def test_the_command_says_what_it_cannot_run() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("penstock"), "deepspeed", "--", "no-such-program"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 1
    assert done.stderr == "Error: no-such-program cannot be run: No such file or directory\n"
    done = subprocess.run(
        [Path(sys.executable).with_name("penstock"), "deepspeed", "--", ""],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 2
    assert done.stderr.endswith("Error: the name of COMMAND is empty\n")


@pytest.mark.parametrize("theirs", ["sys.seen = __file__, __spec__.origin", "raise KeyError", None])
def test_a_sitecustomize_of_somebody_else_runs_as_itself(
    tmp_path: Path, theirs: str | None
) -> None:
    """One that raises, or that of another Penstock, leaves the ops installed."""
    path = tmp_path / "sitecustomize.py"
    if theirs is None:
        ours = environment({})["PYTHONPATH"]
        shutil.copy(Path(ours) / "sitecustomize.py", path)
    else:
        path.write_text(f"import sys\n{theirs}\n")
    code = """
        import sys
        print(any("deepspeed.patches" in type(one).__module__ for one in sys.meta_path))
        print(getattr(sys, "seen", None))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment({**os.environ, "PYTHONPATH": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    seen = (str(path), str(path)) if theirs and "seen" in theirs else None
    assert done.stdout == f"True\n{seen}\n", done.stderr
    assert ("KeyError" in done.stderr) == (theirs == "raise KeyError")
    assert "Recursion" not in done.stderr


# ---- The hook, without DeepSpeed


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Makes a package like a checkout of DeepSpeed on the path."""
    package = tmp_path / "op_builder"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "builder.py").write_text("class OpBuilder:\n    def load(self): return 'theirs'\n")
    meta, modules = sys.meta_path[:], set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("PENSTOCK_DEEPSPEED", "PYTHONPATH"):
        monkeypatch.setenv(name, "")
    yield tmp_path
    sys.meta_path[:] = meta
    for name in set(sys.modules) - modules:
        if name.split(".")[0] == "op_builder":
            del sys.modules[name]


@pytest.mark.parametrize("first", ["enable", "import"])
def test_builders_are_changed_whenever_they_are_defined(checkout: Path, first: str) -> None:
    import importlib

    if first == "enable":
        deepspeed.enable()
    builder = importlib.import_module("op_builder.builder").OpBuilder
    early: Any = type("Early", (builder,), {"NAME": "async_io", "load": lambda self: "theirs"})
    if first == "import":
        deepspeed.enable()
        deepspeed.enable()
    late: Any = type("Late", (early,), {"NAME": "gds", "load": lambda self: "theirs"})
    other: Any = type("Other", (builder,), {"NAME": "cpu_adam"})
    assert early().load() is ops.module("async_io")
    assert late().load(verbose=True) is ops.module("gds")
    assert late().is_compatible(verbose=False)
    assert other().load() == "theirs"
    assert os.environ["PENSTOCK_DEEPSPEED"] == "strict"


def test_the_variables_are_added_once(tmp_path: Path) -> None:
    once = environment({"PYTHONPATH": f"{tmp_path}{os.pathsep}", "HOME": "/"}, strict=False)
    site, *others = once["PYTHONPATH"].split(os.pathsep)
    assert (Path(site) / "sitecustomize.py").exists()
    # The path includes the working directory.
    assert others == [str(tmp_path), ""]
    assert (once["PENSTOCK_DEEPSPEED"], once["HOME"]) == ("lenient", "/")
    assert environment(once, strict=False) == once
    assert environment({"PYTHONPATH": ""})["PYTHONPATH"] == site
