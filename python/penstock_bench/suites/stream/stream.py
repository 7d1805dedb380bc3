"""Models that do not fit into memory: who generates how many tokens a second."""

from __future__ import annotations

import os
import shutil
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.common.machine.limits import LimitError, limited
from penstock.common.machine.quiesce import quiesce_after
from penstock_bench.harness import fio, storage
from penstock_bench.harness.fio import FioError
from penstock_bench.harness.running import BenchError, rotated, run_module
from penstock_bench.peers.stream import GENERATORS, OURS, RESIDENT
from penstock_bench.results.results import Measurement
from penstock_bench.suites.stream.tokens import CASE, FIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from penstock_bench.results.results import Results

_PROMPT_TOKENS = 8
_SPARE_BYTES = 64 << 20
"""The part of the limit beside weights and libraries: activations, caches, copies."""
_FIO_DEPTH = 64

_SIZES = {
    "toy": (64, 96, 4, 4, 2, 512),
    "1b": (2048, 5632, 24, 32, 4, 32_000),
    "3b": (3072, 8192, 28, 24, 8, 32_000),
    "8b": (4096, 14_336, 32, 32, 8, 128_256),
    "moe": (1024, 1024, 12, 16, 4, 32_000, 64, 8),
}
_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size", "num_local_experts", "num_experts_per_tok",
)  # fmt: skip
SIZES = {name: dict(zip(_NAMES, sizes, strict=False)) for name, sizes in _SIZES.items()}
"""Llamas by name, of bfloat16; a Mixtral where there are experts."""


def weight_bytes(size: str) -> int:
    """Bytes of the weights of a model."""
    one = SIZES[size]
    hidden, heads = one["hidden_size"], one["num_attention_heads"]
    keys = hidden // heads * one["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * keys
    experts = one.get("num_local_experts", 1)
    router = hidden * one.get("num_local_experts", 0)
    block = attention + 3 * hidden * one["intermediate_size"] * experts + router + 2 * hidden
    return 2 * (2 * one["vocab_size"] * hidden + one["num_hidden_layers"] * block + hidden)


@dataclass(slots=True, kw_only=True)
class Plan:
    """The measurements to make.

    The limit is the memory of each process; None for half of the model. Up to `lookup` tokens are
    guessed from those before and checked in one pass; 0 for a pass of each token.
    """

    work: Path
    size: str
    names: list[str]
    rounds: int
    tokens: int
    lookup: int
    limit_bytes: int | None
    timeout_seconds: float


@dataclass(slots=True)
class Stream:
    """A run of it."""

    plan: Plan
    results: Results
    progress: Callable[[str], object]
    _failed: set[str] = field(default_factory=set)
    _logits: list[str] | None = None
    _limit_bytes: int = 0
    _budget_bytes: int = 0
    _library_bytes: int = 0

    def run(self) -> None:
        """Makes the model, tries everybody with a toy, and measures in rounds."""
        model, toy = self.plan.work / "model", self.plan.work / "toy"
        for size, directory in (("toy", toy), (self.plan.size, model)):
            self.progress(f"making the model {size}")
            job = {"directory": str(directory), "config": SIZES[size]}
            made = self._child(job | {"is_repeating": self.plan.lookup > 0})
            if "error" in made:
                raise BenchError(f"making the model {size}: {made['error']}")
        weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        self._limit_bytes = self.plan.limit_bytes or weights // 2
        self.results.settings |= {"weight_bytes": weights, "limit_bytes": self._limit_bytes}
        case = {"pattern": CASE, "size": self.plan.size, "lookup": self.plan.lookup}
        self.results.cases = {CASE: case}
        self._look_at_libraries(toy)
        for number in range(self.plan.rounds):
            for name in rotated(self.plan.names, number):
                if name in self._failed:
                    continue
                # Devices drift: what this one gives is asked before and after ours.
                if name == OURS:
                    self._fio(model, number)
                self.progress(f"round {number + 1} of {self.plan.rounds}: {name}")
                self._turn(name, model, number)
                if name == OURS:
                    self._fio(model, number)

    def _look_at_libraries(self, toy: Path) -> None:
        """Measures the memory of a process that has next to no weights."""
        self.progress("a model of nearly nothing")
        found = self._generated(OURS, toy, 0, tokens=2)
        if "error" in found:
            raise BenchError(f"with a model of nearly nothing: {found['error']}")
        self._library_bytes = found["memory_peak_bytes"]
        # Pages that are in memory already, as of shared libraries, are not counted for the group.
        counted_bytes = found.get("group_peak_bytes") or self._library_bytes
        self._budget_bytes = max(1, self._limit_bytes - counted_bytes - _SPARE_BYTES)
        self.results.settings |= {
            "library_bytes": self._library_bytes,
            "budget_bytes": self._budget_bytes,
        }

    def _turn(self, name: str, model: Path, number: int) -> None:
        budget = self._budget_bytes
        if GENERATORS[name].has_files:
            prepared = self._generated(name, model, budget, tokens=0, is_preparing=True)
            if "error" in prepared:
                self._give_up(name, number, prepared["error"])
                return
            quiesce_after(self.plan.work, self.results.settings["weight_bytes"])
        found = self._generated(name, model, budget, tokens=self.plan.tokens)
        shutil.rmtree(self._place(name), ignore_errors=True)
        if "error" in found:
            self._give_up(name, number, found["error"])
            return
        self._take(name, number, found)

    def _take(self, name: str, number: int, found: dict[str, Any]) -> None:
        if self._logits is None or name == RESIDENT:
            self._logits = found["logits"]
        equal = sum(a == b for a, b in zip(self._logits, found["logits"], strict=True))
        # Tokens of a pass come together: they share its time.
        # If there is one pass, it gives all of them.
        pass_tokens = statistics.mean(found["pass_tokens"] or [len(found["logits"])])
        passes = found["pass_seconds"] or [found["first_token_seconds"]]
        made = Measurement(
            case=CASE,
            by=name,
            round_index=number,
            nbytes=found["read_bytes"],
            requests=len(found["logits"]),
            seconds=found["seconds"],
            open_seconds=found["open_seconds"],
            cpu_seconds=found["cpu_seconds"],
            is_direct=found.get("is_direct", False),
            setup=found.get("setup", ""),
            notes=found.get("notes", []),
            checked=equal,
            first_token_seconds=found["first_token_seconds"],
            token_seconds=statistics.median(passes) / pass_tokens,
            pass_tokens=pass_tokens,
            memory_peak_bytes=found["memory_peak_bytes"],
            memory_over_bytes=found["memory_peak_bytes"] - self._library_bytes,
            budget_bytes=self._budget_bytes,
            written_bytes=found["written_bytes"],
            pass_bytes=found.get("pass_bytes"),
            routed_bytes=found.get("routed_bytes"),
        )
        if equal < len(found["logits"]):
            made.notes.append(f"{len(found['logits']) - equal} logits are not those in memory")
        self.results.measurements.append(made)

    def _generated(
        self, name: str, model: Path, budget: int, *, tokens: int, is_preparing: bool = False
    ) -> dict[str, Any]:
        """Runs a process within the limit, with nothing of its files in memory."""
        entry = GENERATORS[name]
        place = self._place(name) if model.name == "model" else self.plan.work / f"toy-{name}"
        place.mkdir(exist_ok=True)
        vocabulary = SIZES[self.plan.size if model.name == "model" else "toy"]["vocab_size"]
        job = {
            "by": name,
            "model": str(model),
            "place": str(place),
            "memory_bytes": budget or 1 << 30,
            "is_preparing": is_preparing,
            "group": None,
            "prompt": [1 + 7919 * index % (vocabulary - 1) for index in range(_PROMPT_TOKENS)],
            "tokens": tokens,
            "lookup": self.plan.lookup,
        }
        os.sync()
        files = [path for path in self.plan.work.rglob("*") if path.is_file()]
        storage.drop(files)
        if not entry.is_limited or is_preparing:
            return self._child(job)
        try:
            with limited(self._limit_bytes) as group:
                found = self._child(job | {"group": str(group.processes)})
                return found | {"group_peak_bytes": group.peak_bytes}
        except LimitError as error:
            return {"error": f"skipped, as memory cannot be limited: {error}"}

    def _child(self, job: dict[str, Any]) -> dict[str, Any]:
        module = "penstock_bench.suites.stream.generating"
        return run_module(module, job, timeout_seconds=self.plan.timeout_seconds)

    def _place(self, name: str) -> Path:
        return self.plan.work / name

    def _give_up(self, name: str, number: int, error: str) -> None:
        self._failed.add(name)
        self.results.measurements.append(
            Measurement(case=CASE, by=name, round_index=number, error=error)
        )

    def _fio(self, model: Path, number: int) -> None:
        """Reads the files one behind the other, as fast as it goes."""
        if FIO in self._failed:
            return
        self.progress(f"round {number + 1} of {self.plan.rounds}: fio")
        files = sorted(model.glob("*.safetensors"))
        command = fio.command(
            filename=":".join(map(str, files)),
            file_service_type="sequential",
            rw="read",
            bs="1M",
            iodepth=_FIO_DEPTH,
        )
        try:
            side = fio.job(command)["read"]
        except FioError as error:
            self._give_up(FIO, number, str(error))
            return
        seconds = side["runtime"] / 1000
        self.results.measurements.append(
            Measurement(
                case=CASE,
                by=FIO,
                round_index=number,
                nbytes=side["io_bytes"],
                requests=side["total_ios"],
                seconds=seconds,
                is_direct=True,
                setup=" ".join(command[1:]),
            )
        )
