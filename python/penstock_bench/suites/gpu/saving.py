"""The stalls of training in background saves, and the time of synchronous saves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from packaging.version import parse

import penstock
from penstock import _native
from penstock_bench.harness.running import rotated
from penstock_bench.suites.gpu import accelerators
from penstock_bench.suites.gpu.run import remove, seconds_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock_bench.suites.gpu.run import Run


_STEPS, _BATCHES = 8, 8
"""Steps of a training between two saves, and batches of a step."""


def stalls(run: Run) -> None:
    """`save_async`, eager and lazy, and DCP's with a stager whose memory is pinned and kept."""
    state = accelerators.state(run.device, run.size_bytes)
    nbytes = accelerators.size(run.size_bytes)
    store = penstock.CheckpointStore(run.memory / "stalls")
    dcp = _Dcp.of(run)
    # The first of each kind pins memory and imports what it needs.
    for step, is_lazy in enumerate((False, True)):
        store.save_async(step, state, lazy=is_lazy).result()
        store.delete(step)
    if dcp is not None:
        dcp.save(state)
    for number in run.each_round("stalls"):
        step = 10 * (number + 1)
        link = run.link("to_host")
        stall: dict[str, float] = {}

        def eager(step: int = step, stall: dict[str, float] = stall, link: float = link) -> None:
            before = _native.pinned_bytes()
            stall["eager"], report = _stall(run, store, step, state)
            if not report.device_bytes:
                raise RuntimeError(f"nothing was copied by the GPU: {report.fallbacks}")
            run.results.add("pinned_again", _native.pinned_bytes() - before)
            staged = report.phases.get("stage", stall["eager"])
            run.results.add("staging", nbytes / staged / 1e9 / link)
            run.results.figure("eager stall, s", stall["eager"])

        def lazy(step: int = step + 1) -> None:
            seconds, _ = _stall(run, store, step, state, lazy=True)
            run.results.add("lazy_stall", seconds * 1e3)

        def theirs(stall: dict[str, float] = stall) -> None:
            if dcp is not None:
                stall["dcp"] = dcp.save(state)
                run.results.figure("stall of DCP, s", stall["dcp"])

        measures: list[Callable[[], None]] = [eager, lazy, theirs]
        for measure in rotated(measures, number):
            measure()
        run.results.add("stall", stall["eager"] / (nbytes / 1e9 / link))
        if "dcp" in stall:
            run.results.add("stall_dcp", stall["eager"] / stall["dcp"])
    store.close()
    remove(run.memory / "stalls")
    if dcp is not None:
        dcp.close()


def _stall(
    run: Run, store: penstock.CheckpointStore, step: int, state: Any, *, lazy: bool = False
) -> tuple[float, penstock.reports.SaveReport]:
    """Seconds until the call has returned; the save is over and removed afterwards."""
    run.device.synchronize()
    begun = time.perf_counter()
    pending = store.save_async(step, state, lazy=lazy)
    seconds = time.perf_counter() - begun
    report = pending.result()
    store.delete(step)
    return seconds, report


class _Dcp:
    """`async_save` by a stager that keeps its memory, which is pinned."""

    def __init__(self, directory: Path) -> None:
        import torch
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._directory = directory
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=True,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=True,
            )
        )
        if parse(torch.__version__).release < (2, 12):
            # It gives its memory back after each state, and then stages no other.
            stager = self._stager._state_dict_stager
            stager.close = lambda: None  # type: ignore[method-assign]

    @classmethod
    def of(cls, run: Run) -> _Dcp | None:
        """None where it cannot be, which the row says then."""
        if run.device.is_stand_in:
            run.results.skip("stall_dcp", "DCP pins memory by PyTorch, which needs a GPU")
            return None
        return cls(run.memory / "dcp")

    def save(self, state: Any) -> float:
        """Seconds until the call has returned and all is staged; all is over afterwards."""
        import torch
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

        torch.cuda.synchronize()
        writer = FileSystemWriter(self._directory, thread_count=4, sync_files=False)
        begun = time.perf_counter()
        response = async_save(state, storage_writer=writer, async_stager=self._stager, no_dist=True)
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result()
        seconds = time.perf_counter() - begun
        if isinstance(response, AsyncSaveResponse):
            response.upload_completion.result()
        else:
            response.result()
        remove(self._directory)
        return seconds

    def close(self) -> None:
        """Gives its memory back."""
        self._stager.close()


def whole(run: Run) -> None:
    """`penstock.save` of the GPU's tensors, and of the same ones in memory of the host."""
    state = accelerators.state(run.device, run.size_bytes)
    host = {name: run.device.read(tensor) for name, tensor in state.items()}
    nbytes = accelerators.size(run.size_bytes)
    states: list[tuple[str, Any]] = [("GPU", state), ("host", host)]
    for row, place in (("save_memory", run.memory), ("save_disk", run.disk)):
        where = "tmpfs" if row == "save_memory" else "the disk"
        for number in run.each_round(f"saves to {where}"):
            seconds: dict[str, float] = {}
            for name, one in rotated(states, number):
                run.device.synchronize()
                seconds[name] = seconds_of(_saving(place / "whole", one))
                remove(place / "whole")
                run.results.figure(
                    f"save to {where} from the {name}, GB/s", nbytes / seconds[name] / 1e9
                )
            run.results.add(row, seconds["host"] / seconds["GPU"])


def _saving(path: Path, state: Any) -> Callable[[], object]:
    return lambda: penstock.save(path, state)


def steps(run: Run) -> None:
    """Steps of a training with a lazy save among them, and as many without."""
    if run.device.is_stand_in:
        run.results.skip("lazy_steps", "PyTorch computes nothing on the driver for tests")
        return
    import torch

    training = _Training(run.size_bytes)
    store = penstock.CheckpointStore(run.memory / "steps")
    training.steps(1)
    # The first save pins memory.
    store.save_async(0, training.state(), lazy=True).result()
    store.delete(0)
    for number in run.each_round("steps of a training"):
        taken: dict[bool, float] = {}
        for saves in rotated([False, True], number):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            pending = store.save_async(number + 1, training.state(), lazy=True) if saves else None
            training.steps(_STEPS)
            torch.cuda.synchronize()
            taken[saves] = time.perf_counter() - begun
            if pending is not None:
                pending.result()
                store.delete(number + 1)
        run.results.add("lazy_steps", taken[True] / taken[False] - 1)
        run.results.figure("a step of the training, ms", taken[False] / _STEPS * 1e3)
    store.close()
    remove(run.memory / "steps")


class _Training:
    """Layers and AdamW whose parameters and moments come to so many bytes."""

    def __init__(self, nbytes: int) -> None:
        import torch

        torch.backends.cuda.matmul.allow_tf32 = True
        width = 4096
        layers = max(1, nbytes // 3 // (4 * width * width))
        self._model = torch.nn.Sequential(
            *(torch.nn.Linear(width, width, device="cuda:0") for _ in range(layers))
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), fused=True)
        self._input = torch.randn(4096, width, device="cuda:0")
        penstock.guard(self._optimizer)

    def steps(self, count: int) -> None:
        """Computes and changes everything."""
        for _ in range(count):
            for _ in range(_BATCHES):
                self._model(self._input).square().mean().backward()
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> Any:
        """The state to save."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
