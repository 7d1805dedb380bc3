"""`Job`: one export, linked if possible, or read, converted and written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.checkpoint.exporting import streamed
from penstock.checkpoint.exporting.directory import appearing, write
from penstock.checkpoint.saving.blocking import save_and_wait
from penstock.checkpoint.saving.destination import Destination
from penstock.checkpoint.saving.groups import IN_PLACE, INDEX, Groups
from penstock.common.paths import of_bucket
from penstock.errors import StateMismatchError, StorageError, storage_errors
from penstock.reports import ExportReport
from penstock.tensors import dtypes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from penstock.checkpoint.exporting.chosen import Shards, Weight
    from penstock.checkpoint.exporting.models import MetaModel
    from penstock.checkpoint.loading.opened import OpenCheckpoint
    from penstock.common.progress import Progress
    from penstock.options import Options

CONFIG = "config.json"

_TENSORS = "tensors"


class _NotSharedError(Exception):
    """The file system cannot share blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One export, with checked arguments.

    Attributes:
        checkpoint: The checkpoint.
        out: The directory to create.
        kind: Type for floating-point tensors.
        beside: Small files, by name.
        model: The model whose names are compared.
        fused: The model that splits fused tensors.
        settings: How bytes move, in the native module's form.
        options: The same, in the caller's form.
        shard_bytes: Largest size of a file.
        memory_bytes: Memory for data being moved.
        began: Start time.
    """

    checkpoint: OpenCheckpoint
    out: str
    kind: torch.dtype | None
    beside: dict[str, bytes]
    model: MetaModel | None
    fused: MetaModel | None
    settings: dict[str, Any]
    options: Options
    shard_bytes: int
    memory_bytes: int
    began: float

    def takes(self, shards: Shards, weights: list[Weight]) -> bool:
        """Whether shards are exactly the requested tensors, unchanged."""
        if self.fused is not None or {weight.name for weight in weights} != set(shards.file_of):
            return False
        if any(weight.is_window for weight in weights):
            return False
        kinds = [dtypes.torch_dtypes().get(name) for name in shards.dtypes]
        return all(kind is not None and self._cast(kind) == kind for kind in kinds)

    def _cast(self, kind: torch.dtype) -> torch.dtype:
        """Returns the exported type of a type."""
        return self.kind if self.kind is not None and kind in floats() else kind

    def link(self, shards: Shards, *, is_hard: bool) -> ExportReport | None:
        """Exports shards as they are; returns None if they would have to be copied."""
        self._check(shards.file_of)
        if of_bucket(self.checkpoint.path) and not is_hard:
            return None
        names = _names(len(shards.files))
        way: Way = "hard link" if is_hard else "reflink"
        name_of = dict(zip(shards.files, names, strict=True))
        file_of = {tensor: name_of[file] for tensor, file in shards.file_of.items()}
        try:
            with appearing(self.out) as directory:
                for file, name in name_of.items():
                    source = os.path.join(self.checkpoint.path, file)
                    target = os.path.join(directory, name)
                    if is_hard:
                        hard_link(source, target)
                    elif not reflink(source, target):
                        raise _NotSharedError
                return self._finish(directory, file_of, shards.total_bytes, 0, way)
        except _NotSharedError:
            return None

    def write(self, weights: list[Weight], update: Progress | None) -> ExportReport:
        """Exports tensors by reading, converting and writing them."""
        parts = self._parts(weights)
        if parts is None or not streamed.takes(parts):
            return self._write_chunks(weights, update)
        types = dtypes.torch_dtypes()
        files = streamed.plan(parts, lambda name: self._cast(types[name]), self.shard_bytes)
        names = _names(len(files))
        written_bytes = sum(file.nbytes - len(file.header) for file in files)
        file_of = {
            place.weight.name: name
            for file, name in zip(files, names, strict=True)
            for place in file.places
        }
        stream = streamed.Stream(self.checkpoint, self.settings, self.options, self.memory_bytes)
        with appearing(self.out) as directory:
            stream.run(files, [os.path.join(directory, name) for name in names], update)
            return self._finish(directory, file_of, written_bytes, written_bytes, "copy")

    def _parts(self, weights: list[Weight]) -> list[Weight] | None:
        """Returns the tensors to write; None if this depends on their bytes."""
        if self.fused is None:
            self._check({weight.name: "" for weight in weights})
            return weights
        # This module needs PyTorch.
        from penstock.checkpoint.exporting.apart import split_weights

        return split_weights(weights, self.fused)

    def _write_chunks(self, weights: list[Weight], update: Progress | None) -> ExportReport:
        """Exports tensors whose exported form depends on their bytes."""
        chunk_bytes = max(min(self.shard_bytes, self.memory_bytes // 2), 1)
        chunks = list(_chunks(weights, chunk_bytes))
        total_bytes = sum(weight.nbytes for weight in weights)
        done_bytes, written_bytes = 0, 0
        file_of: dict[str, str] = {}
        # The names of split tensors are known only after the split.
        with appearing(self.out) as directory:
            made: list[str] = []
            with ThreadPoolExecutor(1, thread_name_prefix="penstock-export") as writer:
                pending = None
                for number, chunk in enumerate(chunks):
                    tensors = self._read(chunk)
                    if pending is not None:
                        pending.result()
                    for name in tensors:
                        if name in file_of:
                            raise StateMismatchError(
                                f"{self.checkpoint.path}: two tensors would be called {name!r}",
                                key=name,
                                path=self.checkpoint.path,
                            )
                        file_of[name] = str(number)
                    made.append(os.path.join(directory, f"shard.{number}"))
                    written_bytes += sum(one.nbytes for one in tensors.values())
                    pending = writer.submit(self._save, tensors, made[-1])
                    del tensors
                    done_bytes += sum(weight.nbytes for weight in chunk)
                    if update is not None:
                        update(done_bytes, total_bytes)
                if pending is not None:
                    pending.result()
            names = _names(len(made))
            for path, name in zip(made, names, strict=True):
                os.rename(path, os.path.join(directory, name))
            file_of = {tensor: names[int(number)] for tensor, number in file_of.items()}
            return self._finish(directory, file_of, written_bytes, written_bytes, "copy")

    def _read(self, chunk: list[Weight]) -> dict[str, Any]:
        import torch

        with self.checkpoint.reading():
            values = list(self.checkpoint.values([weight.node for weight in chunk], self.settings))
        found: dict[str, Any] = {}
        for weight, value in zip(chunk, values, strict=True):
            tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
            # A window of a tensor becomes a separate tensor in a file.
            if weight.is_window:
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            found[weight.name] = tensor.to(self._cast(tensor.dtype)).contiguous()
        return found if self.fused is None else self.fused.as_published(found)

    def _save(self, tensors: dict[str, Any], path: str) -> None:
        """Writes one file, as a save writes a shard."""
        place = f"{path}.saving"
        destination = Destination(path=place, groups=Groups({_TENSORS: IN_PLACE}))
        one = {**self.settings, "shard_bytes": 1 << 62}
        save_and_wait(destination, {_TENSORS: tensors}, None, one, progress=False)
        (file,) = (name for name in os.listdir(place) if name.endswith(".safetensors"))
        os.rename(os.path.join(place, file), path)
        shutil.rmtree(place)

    def _check(self, names: dict[str, str]) -> None:
        if self.model is not None:
            self.model.check(names.keys(), self.checkpoint.path)

    def _finish(
        self,
        directory: str,
        file_of: dict[str, str],
        tensor_bytes: int,
        bytes_written: int,
        way: str,
    ) -> ExportReport:
        weights = sorted(set(file_of.values()))
        beside = dict(self.beside)
        if len(weights) > 1:
            beside[INDEX] = _index(file_of, tensor_bytes)
        if self.kind is not None and CONFIG in beside:
            beside[CONFIG] = _retyped(beside[CONFIG], self.kind)
        for name, content in beside.items():
            write(directory, name, content)
        return ExportReport(
            path=self.out,
            tensors=len(file_of),
            tensor_bytes=tensor_bytes,
            bytes_written=bytes_written,
            way=way,
            files=(*weights, *beside),
            seconds=time.perf_counter() - self.began,
        )


def _chunks(weights: list[Weight], chunk_bytes: int) -> Iterator[list[Weight]]:
    chunk: list[Weight] = []
    size = 0
    for weight in weights:
        if chunk and size + weight.nbytes > chunk_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(weight)
        size += weight.nbytes
    if chunk:
        yield chunk


def _names(count: int) -> list[str]:
    """Returns names of weight files, like those of `save_pretrained`."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _index(file_of: dict[str, str], tensor_bytes: int) -> bytes:
    index = {"metadata": {"total_size": tensor_bytes}, "weight_map": dict(sorted(file_of.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


def floats() -> set[torch.dtype]:
    """Returns the types that a model may be cast from and to."""
    import torch

    return {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def _retyped(config: bytes, kind: torch.dtype) -> bytes:
    """Returns a configuration with the tensors' new type."""
    try:
        facts = json.loads(config)
    except ValueError:
        return config
    if not isinstance(facts, dict):
        return config
    member = "torch_dtype" if "torch_dtype" in facts else "dtype"
    facts[member] = str(kind).removeprefix("torch.")
    return json.dumps(facts, indent=2).encode() + b"\n"


Way: TypeAlias = Literal["reflink", "hard link", "copy"]
"""How a file got its other name."""

_FICLONE = 0x40049409
"""Shares the blocks of a file with an empty one: ioctl_ficlone(2)."""

_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)

NO_LINK = (
    errno.EPERM,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EXDEV,
    errno.EMLINK,
)
"""Errors for a file that cannot be hard-linked to that place."""


def reflink(source: str, target: str) -> bool:
    """Creates a file that shares the blocks of another; returns whether this is supported."""
    shared = storage_errors("share the blocks of", source)
    with shared, open(source, "rb") as old, open(target, "xb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            os.remove(target)
            return False
    return True


def hard_link(source: str, target: str) -> None:
    """Creates a hard link to a file."""
    try:
        os.link(source, target)
    except OSError as error:
        remedy = ": leave --hard-link out to copy it" if error.errno in NO_LINK else ""
        raise StorageError(
            f"cannot link {source}: {error.strerror}{remedy}", path=source, errno=error.errno
        ) from error
