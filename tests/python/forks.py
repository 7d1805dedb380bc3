"""Python programs that start with PyTorch imported: forks of an interpreter that did so.

Importing PyTorch takes seconds, most tests in a process of their own much less. `run` and `Popen`
take the arguments of `subprocess` after the interpreter: ``-c CODE``, ``-m MODULE`` or a file, and
its arguments. Only third-party packages are imported in advance: each process imports Penstock
anew. A process is a child of the process that started it, as the server hands it over and tests
adopt orphans (`leftovers`).

A process ends through the end of the interpreter, but leaves what was imported in advance as it is:
to free PyTorch's objects means to copy the memory that they share with the server, 0.2 to
0.35 s of processor time. `WholePopen`, `WholeGraphPopen` and so on are for tests of the end itself:
their processes free all.

`RankPopen` starts with the imports of ranks and optimizers as well, `GraphPopen` with PyTorch
Geometric, `ModelPopen` with models of transformers, which take even longer to import, `JaxPopen`
with JAX and without PyTorch, `RayPopen` with Ray Train. Each has a server of its own, as Penstock
checks which modules are imported.

Not for tests of an interpreter's start, nor for tests without PyTorch.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.context import ForkServerContext

IMPORTS = [
    "click",
    "numpy",
    "psutil",
    "rich.console",
    "torch",
]
IMPORTS_OF_RANKS = [
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    # DTensor and optimizers import it at their first use.
    "torch._dynamo",
]
IMPORTS_OF_GRAPHS = [
    "torch._dynamo",
    "torch_geometric.loader",
    "torch_geometric.nn",
]
IMPORTS_OF_TITAN = [
    "torchdata.stateful_dataloader",
    "torchtitan.components.checkpointer",
    "torchtitan.models.llama3",
]
IMPORTS_OF_LIGHTNING = [
    "lightning.pytorch",
    "torchdata.stateful_dataloader",
]
IMPORTS_OF_ACCELERATE = ["accelerate", "torchdata.stateful_dataloader"]
IMPORTS_OF_DEEPSPEED = ["deepspeed"]
IMPORTS_OF_MODELS = [
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]
IMPORTS_OF_JAX = [
    "numpy",
    "jax",
    "optax",
]
IMPORTS_OF_RAY = [
    "ray.train.torch",
    "torch._dynamo",
]
IMPORTS_OF_TRAINERS = [
    "accelerate",
    # Accelerate checks every model for it, if it is installed.
    "deepspeed",
    "torch._dynamo",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
]
_REQUEST_BYTES_MAX = 1 << 20

_preloaded: list[str] = []

_shared: list[Any] = []
"""The modules that a server has imported, by name, and the list itself."""


def fork_server(imports: Sequence[str]) -> ForkServerContext:
    """Returns the context of processes that start with these modules imported.

    An interpreter has a single server of `multiprocessing`: it imports the modules of all callers,
    not those of the last one alone.
    """
    _preloaded.extend(name for name in imports if name not in _preloaded)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded)
    return context


class _Server:
    """The interpreter that is forked, started at its first use.

    Args:
        imports: Modules that it imports.
        base: Server that the interpreter is forked from, after it has imported its own modules.
    """

    def __init__(self, imports: Sequence[str], base: _Server | None = None) -> None:
        self._imports, self._base = imports, base
        self.pid: int | None = None
        self._pipe: socket.socket | None = None

    def fork(self, request: dict[str, Any], files: Sequence[int]) -> int:
        """Returns the process id of a fork that runs a program."""
        if self._pipe is None:
            self._begin()
        socket.send_fds(self._pipe, [json.dumps(request).encode()], files)
        return int(self._pipe.recv(64))

    def _begin(self) -> None:
        self._pipe, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._pipe, there):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_BYTES_MAX)
        with there:
            if self._base is not None:
                self.pid = self._base.fork({"imports": self._imports}, [there.fileno()])
                return
            command = [sys.executable, __file__, *self._imports]
            server = subprocess.Popen(command, stdin=there, cwd="/")
        self.pid = server.pid
        # Its process is waited for by number.
        server.returncode = 0

    def end(self) -> None:
        """Ends the server; the next program starts another one."""
        if self._pipe is not None:
            self._pipe.close()
            os.waitpid(self.pid, 0)
            self._pipe = self.pid = None


server = _Server(IMPORTS)
rank_server = _Server(IMPORTS_OF_RANKS, server)
graph_server = _Server(IMPORTS_OF_GRAPHS, server)
model_server = _Server(IMPORTS_OF_MODELS, server)
jax_server = _Server(IMPORTS_OF_JAX)
ray_server = _Server(IMPORTS_OF_RAY, server)
trainer_server = _Server(IMPORTS_OF_TRAINERS, server)
titan_server = _Server(IMPORTS_OF_TITAN, rank_server)
lightning_server = _Server(IMPORTS_OF_LIGHTNING, rank_server)
accelerate_server = _Server(IMPORTS_OF_ACCELERATE, rank_server)
deepspeed_server = _Server(IMPORTS_OF_DEEPSPEED, rank_server)
servers = (
    server,
    rank_server,
    graph_server,
    model_server,
    jax_server,
    ray_server,
    trainer_server,
    titan_server,
    lightning_server,
    accelerate_server,
    deepspeed_server,
)


class Popen(subprocess.Popen):
    """`subprocess.Popen` for a Python program, without the interpreter in front."""

    server = server
    is_whole = False

    def _execute_child(self, args: Sequence[object], *rest: Any) -> None:  # type: ignore[override]
        _, preexec_fn, _, pass_fds, cwd, env, _, _, has_shell, *pipes = rest[:15]
        assert not any((preexec_fn, pass_fds, has_shell)), "a fork does not take that"
        has_session = rest[20]
        request = {
            "arguments": [str(argument) for argument in args],
            "directory": str(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "has_session": has_session,
            "is_whole": self.is_whole,
        }
        # The child's ends: it reads the first one, and writes the others.
        ends = (pipes[0], pipes[3], pipes[5])
        files = [own if end == -1 else end for own, end in enumerate(ends)]
        self.pid = self.server.fork(request, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class WholePopen(Popen):
    """Frees everything at its end, as an interpreter of its own does."""

    is_whole = True


class RankPopen(Popen):
    """Starts with the imports of ranks, too."""

    server = rank_server


class GraphPopen(Popen):
    """Starts with PyTorch Geometric, too."""

    server = graph_server


class WholeGraphPopen(GraphPopen):
    """Frees everything at its end."""

    is_whole = True


class JaxPopen(Popen):
    """Starts with JAX instead of PyTorch."""

    server = jax_server


class WholeJaxPopen(JaxPopen):
    """Frees everything at its end."""

    is_whole = True


class RayPopen(Popen):
    """Starts with Ray Train, too."""

    server = ray_server


class TrainerPopen(Popen):
    """Starts with the Trainer of transformers, too."""

    server = trainer_server


class TitanPopen(Popen):
    """Starts with torchtitan."""

    server = titan_server


class LightningPopen(Popen):
    """Starts with Lightning, too."""

    server = lightning_server


class WholeLightningPopen(LightningPopen):
    """Frees everything at its end."""

    is_whole = True


class AcceleratePopen(Popen):
    """Starts with Accelerate, too."""

    server = accelerate_server


class DeepSpeedPopen(Popen):
    """Starts with DeepSpeed, too."""

    server = deepspeed_server


class InterpreterPopen(Popen):
    """Takes a whole command, `[sys.executable, "-P", "-m", …]`."""

    def __init__(self, command: Sequence[object], **options: Any) -> None:
        interpreter, *arguments = command
        assert interpreter == sys.executable
        super().__init__([one for one in arguments if one != "-P"], **options)


class ModelPopen(InterpreterPopen):
    """Starts with the imports for generating text, too."""

    server = model_server


def replacing(popen: type[Popen]) -> types.SimpleNamespace:
    """Returns a stand-in for the module `subprocess` that starts forks."""
    return types.SimpleNamespace(**vars(subprocess) | {"Popen": popen})


def run(
    arguments: Sequence[object],
    *,
    timeout: float = 200,
    check: bool = False,
    popen: type[Popen] = Popen,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a fork; returns the result of `subprocess.run`, with text output."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with popen(arguments, **streams) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(arguments, process.returncode, out, errors)
    if check:
        done.check_returncode()
    return done


def _serve(pipe: socket.socket) -> dict[str, Any]:
    """Forks for each request; returns in the forks only, with the program to run."""
    while True:
        data, files, _, _ = socket.recv_fds(pipe, _REQUEST_BYTES_MAX, 3)
        if not data:
            os._exit(0)
        receiver, sender = os.pipe()
        between = os.fork()
        if between == 0:
            if child := os.fork():
                os.write(sender, str(child).encode())
                # Without a parent the child is adopted by the tests.
                os._exit(0)
            for number, file in enumerate(files):
                os.dup2(file, number)
            for file in (*files, receiver, sender):
                os.close(file)
            pipe.close()
            _open_streams()
            return json.loads(data)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)
        pipe.send(os.read(receiver, 64))
        os.close(receiver)
        os.close(sender)


def _imported(names: Sequence[str]) -> socket.socket:
    """Imports modules in a server; returns the socket of its requests, which was its input."""
    pipe, out, errors = socket.socket(fileno=os.dup(0)), os.dup(1), os.dup(2)
    # The server ignores a signal to the whole foreground group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(os.devnull, "r+") as nothing:
        # Frameworks warn of what this machine lacks.
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    try:
        for name in names:
            # For speed only: a program that needs a missing module raises by itself.
            with contextlib.suppress(ModuleNotFoundError):
                __import__(name)
    finally:
        for number, file in ((1, out), (2, errors)):
            os.dup2(file, number)
            os.close(file)
    # Forks share these objects, and neither copy nor collect them at their end. A frozen list that
    # holds itself is never freed.
    _shared[:] = [_shared, {name: sys.modules[name] for name in sys.modules if _is_foreign(name)}]
    gc.collect()
    gc.freeze()
    return pipe


def _is_foreign(module: str) -> bool:
    package = module.partition(".")[0]
    return package not in sys.stdlib_module_names and package != "__main__"


def _leave_shared() -> None:
    """Takes the shared modules out of the end of the interpreter."""
    for name in _shared[1]:
        sys.modules.pop(name, None)


def _leave_libraries() -> None:
    """Lets the process end before the destructors of libraries that the server has loaded.

    Those of libraries loaded later run, in the reverse order of their registration.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)


def _open_streams() -> None:
    """Opens the standard streams: those of the server belong to its own files."""
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for name, errors in (("stdin", "strict"), ("stdout", "strict"), ("stderr", "backslashreplace")):
        number = ("stdin", "stdout", "stderr").index(name)
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw) if number else io.BufferedReader(raw),
            encoding="utf-8",
            errors=errors,
            newline="\n" if number else None,
            line_buffering=name == "stderr" or raw.isatty(),
            write_through=number > 0 and is_unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(request: dict[str, Any]) -> None:
    """Runs a program as the interpreter would."""
    if request["is_whole"]:
        atexit.unregister(_leave_shared)
    else:
        _leave_libraries()
    if request["has_session"]:
        os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    kind, *rest = request["arguments"]
    if kind == "-c":
        code, *sys.argv[1:] = rest
        sys.argv[0], sys.path[0] = "-c", ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec", dont_inherit=True), vars(main))
    elif kind == "-m":
        sys.argv[1:], sys.path[0] = rest[1:], request["directory"]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[0] = [kind, *rest], os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    # The first one registered is the last one called.
    atexit.register(_leave_shared)
    _request: dict[str, Any] = {"imports": sys.argv[1:]}
    while "imports" in _request:
        _request = _serve(_imported(_request["imports"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run(_request)
