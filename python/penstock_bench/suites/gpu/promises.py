"""Promises without a rate: valid graphs, consistent states, no leaks, a conforming driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from typing import TYPE_CHECKING

import penstock
from penstock import _native
from penstock.common.machine import gpus
from penstock.errors import StateMismatchError
from penstock_bench.harness.measure import memory_bytes
from penstock_bench.harness.options import ROOT
from penstock_bench.suites.gpu import accelerators
from penstock_bench.suites.gpu.run import remove

if TYPE_CHECKING:
    from penstock_bench.suites.gpu.run import Run

_MIB = 1 << 20


def graphs(run: Run) -> None:
    """Captures graphs while lazy saves copy and write."""
    captures = 10 if run.is_small else 100
    state = accelerators.state(run.device, (8 if run.is_small else 1024) * _MIB)
    store = penstock.CheckpointStore(run.memory / "graphs")
    pending: penstock.PendingSave | None = None
    step = 0
    voided = 0
    run.progress(f"{captures} graphs")
    run.device.capture()
    for number in range(captures):
        run.left()
        if pending is None or pending.done():
            if pending is not None:
                pending.result()
                store.delete(step)
            step = number
            pending = store.save_async(step, state, lazy=True)
        try:
            run.device.capture()
        except RuntimeError as error:
            voided += 1
            run.results.notes["graphs"] = str(error)
    if pending is not None:
        pending.result()
    run.results.add("graphs", voided)
    store.close()
    remove(run.memory / "graphs")


def torn(run: Run) -> None:
    """Changes a state right after saves of it; what is stored has to be what it was."""
    saves = 6 if run.is_small else 200
    nbytes = (4 if run.is_small else 256) * _MIB
    state = accelerators.state(run.device, nbytes)
    store = penstock.CheckpointStore(run.memory / "torn")
    found = 0
    done = 0
    for number in range(saves):
        if number and run.is_over():
            break
        done = number + 1
        run.progress(f"save {done} of {saves} that are hunted for torn states")
        for tensor in state.values():
            run.device.fill(tensor, number)
        pending = store.save_async(number, state, lazy=number % 2 == 0)
        pending.hold()
        for change in range(3):
            for tensor in state.values():
                run.device.fill(tensor, -1.0 - change)
        try:
            pending.result()
        except StateMismatchError as error:
            # Told, and so not torn; but a state that was held must not be.
            run.results.notes["torn"] = f"a save that was held failed: {error}"
            found += 1
            continue
        loaded = store.load(number)
        if not all(bool((tensor == float(number)).all()) for tensor in loaded.values()):
            found += 1
        store.delete(number)
        run.device.synchronize()
    run.results.add("torn", found)
    told = f"{done} saves of {nbytes / 1e9:.2g} GB, half of them lazy"
    run.results.notes.setdefault("torn", told)
    store.close()
    remove(run.memory / "torn")


def leaks(run: Run) -> None:
    """Saves again and again, and counts what there is more of in the end."""
    saves = 30 if run.is_small else 1000
    nbytes = (2 if run.is_small else 64) * _MIB
    state = accelerators.state(run.device, nbytes)
    store = penstock.CheckpointStore(run.memory / "leaks")
    before: dict[str, int] = {}
    done = 0
    for number in range(saves):
        if before and run.is_over():
            break
        if number % 100 == 0:
            run.progress(f"save {number} of {saves}")
        store.save_async(number, state, lazy=number % 2 == 0).result()
        store.delete(number)
        done = number + 1
        if number == saves // 10:
            run.device.synchronize()
            before = _holdings()
    run.device.synchronize()
    after = _holdings()
    store.close()
    remove(run.memory / "leaks")
    grown = {
        name: after[name] - before[name]
        for name, slack in _SLACK.items()
        if after[name] - before[name] > slack
    }
    run.results.add("leaks", len(grown))
    told = ", ".join(f"{count:,} more {name}" for name, count in grown.items())
    run.results.notes["leaks"] = f"{done} saves of {nbytes / 1e9:.2g} GB: {told or 'nothing'}"


_SLACK = {
    "bytes of the GPU": 2 * _MIB,
    "bytes of memory": 64 * _MIB,
    "bytes pinned": 0,
    "files": 0,
    "threads": 2,
}
"""How much more there may be: pools of an allocator, a thread that is about to end."""


def _holdings() -> dict[str, int]:
    return {
        "bytes of the GPU": -gpus.probe_driver(0).gpus[0].free_bytes,
        "bytes of memory": memory_bytes()["VmRSS"],
        "bytes pinned": _native.pinned_bytes(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def conformance(run: Run) -> None:
    """The suite that a driver has to pass, on the one of this machine."""
    if run.device.is_stand_in:
        run.results.skip("conformance", "`make test` runs it on the driver for tests")
        return
    if shutil.which("cargo") is None:
        run.results.skip("conformance", "there is no cargo to build it with")
        return
    run.progress("conformance of crates/cuda")
    command = ["cargo", "test", "--locked", "-p", "penstock-cuda", "--test", "conformance"]
    try:
        done = subprocess.run(
            [*command, "the_systems", "--", "--nocapture"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=run.left(),
        )
    except subprocess.TimeoutExpired:
        run.results.skip("conformance", "there was no time to build it")
        return
    said = f"{done.stdout}\n{done.stderr}"
    if "skipped:" in said or not ("1 passed" in said or "1 failed" in said):
        run.results.skip("conformance", f"it did not run: {said[-200:]}")
        return
    run.results.add("conformance", 0 if done.returncode == 0 else 1)
    if done.returncode:
        run.results.notes["conformance"] = " ".join(said.split())[-300:]
