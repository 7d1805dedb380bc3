"""`ReadAhead`: samples of a batch, and of the batches after it, read together."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset

from penstock.integrations.megatron.datasets.bin_reader import BinReader, reading
from penstock.integrations.megatron.datasets.by_identity import ByIdentity
from penstock.integrations.megatron.datasets.sample_rows import SampleRows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_BUILD = "_build_document_sample_shuffle_indices"
_AHEAD_BYTES = 16 << 20
_AHEAD_ROWS = 512
"""Bounds of what is read ahead in a process and for a dataset: memory, and requests that keep a
device busy with two windows of half as many."""


class Window:
    """The elements of some samples, which are read together.

    It keeps no dataset alive: datasets, as keys, keep it.

    Args:
        dataset: A GPT dataset or a blend of them.
        numbers: The samples.

    Attributes:
        count: Number of rows.
        nbytes: Bytes of all rows.
    """

    def __init__(self, dataset: Any, numbers: np.ndarray[Any, Any]) -> None:
        self._samples = len(numbers)
        self._parts: ByIdentity[SampleRows] = ByIdentity()
        for one, own in _by_dataset(dataset, numbers):
            # Megatron-Core reads the rows that cannot be foreseen, and raises what is wrong.
            with suppress(Exception):
                self._parts.set(one, SampleRows(one, own))
        parts = self._parts.values()
        self.count = sum(part.count for part in parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def batches_ahead(self, size: int) -> int:
        """How many batches of some samples to read ahead, if these have as much as those here."""
        batches = self._samples / size
        return max(
            1,
            min(
                _AHEAD_ROWS // 2,
                int(_AHEAD_ROWS // 2 * batches / max(1, self.count)),
                int(_AHEAD_BYTES // 2 * batches / max(1, self.nbytes)),
            ),
        )

    def begin(self) -> None:
        """Copies the rows that are in the page cache, or begins to read them."""
        for part in self._parts.values():
            part.begin()

    def wait(self) -> None:
        """Waits until everything is read; raises if it cannot be."""
        for part in self._parts.values():
            part.wait()

    def sample(self, dataset: Any, number: int, make: Callable[[Any, int], Any]) -> Any:
        """A sample, of the elements in the window if it has them."""
        part = self._parts.get(dataset)
        return make(dataset, number) if part is None else part.sample(dataset, number, make)

    def read(
        self, reader: BinReader, dtype: Any, count: int, offset: int
    ) -> np.ndarray[Any, Any] | None:
        """A copy of the elements; None if they are not in the window."""
        for part in self._parts.values():
            if part.reader is reader:
                found = part.read(dtype, count, offset)
                if found is not None:
                    return found
        return None


class ReadAhead:
    """The samples of one dataset that this process reads ahead.

    A worker of a `DataLoader` sees one batch after another, and not those to come. The samplers of
    Megatron-LM count upwards, each worker in steps of its own (a GPT dataset shuffles behind that),
    so two equal steps tell where the next batches are. A sampler that jumps, as after a resumption
    and at the end of an epoch, goes on in its steps, and one of these tells it. After batches in
    any other order nothing is read ahead, and the samples of a batch are read together.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._foreseen: dict[tuple[int, ...], Window] = {}
        self._newest = 0
        self._last: np.ndarray[Any, Any] | None = None
        self._step: int | None = None
        self._is_regular = False
        self._length: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether this process made it."""
        return self._process == os.getpid()

    def samples(self, dataset: Any, indices: Sequence[int | None]) -> list[Any]:
        """The samples of a batch, as the dataset makes them."""
        # Megatron-Core takes sample 0 in the place of a missing one.
        numbers = np.array([index or 0 for index in indices], np.int64)
        window = self._take(numbers)
        if window is None:
            window = Window(dataset, numbers)
            window.begin()
        if self._is_regular:
            self._look_ahead(dataset, numbers, window)
        window.wait()
        with reading(window):
            return [dataset[index] for index in indices]

    def _take(self, numbers: np.ndarray[Any, Any]) -> Window | None:
        """The window with a batch, if it was foreseen; drops those before it, or all."""
        last, self._last = self._last, numbers
        key = tuple(numbers.tolist())
        if key in self._foreseen:
            while (first := next(iter(self._foreseen))) != key:
                del self._foreseen[first]
            return self._foreseen.pop(key)
        self._foreseen.clear()
        step = _step(last, numbers)
        # The distance of one jump is no step, and says nothing about the steps behind it.
        is_jump = self._is_regular and step is not None
        self._is_regular = step is not None and step == self._step
        if not is_jump:
            self._step = step
        return None

    def _look_ahead(self, dataset: Any, numbers: np.ndarray[Any, Any], window: Window) -> None:
        """Begins to read the next batches, unless enough are read or on their way."""
        if self._step is None or not window.count or len(self._foreseen) > self._newest // 2:
            return
        if self._length is None:
            self._length = len(dataset)
        newest = np.array(next(reversed(self._foreseen), tuple(numbers.tolist())), np.int64)
        steps = np.arange(1, window.batches_ahead(len(numbers)) + 1)
        batches = newest + self._step * steps[:, None]
        batches = batches[((batches >= 0) & (batches < self._length)).all(1)]
        if not len(batches):
            return
        ahead = Window(dataset, batches.reshape(-1))
        ahead.begin()
        self._foreseen.update(dict.fromkeys(map(tuple, batches.tolist()), ahead))
        self._newest = len(batches)


def _step(last: np.ndarray[Any, Any] | None, numbers: np.ndarray[Any, Any]) -> int | None:
    """The common difference of a batch's indices from the batch before; None if they differ."""
    if last is None or last.shape != numbers.shape or not numbers.size:
        return None
    steps = numbers - last
    return int(steps[0]) if steps[0] and (steps == steps[0]).all() else None


def _by_dataset(
    dataset: Any, numbers: np.ndarray[Any, Any]
) -> Iterator[tuple[Any, np.ndarray[Any, Any]]]:
    """The GPT datasets that samples come from, if readers of ours read these, with their numbers.

    Others are made as if they were not there: Megatron-Core reads them, or says that it has none.
    """
    if isinstance(dataset, BlendedDataset):
        # The indices may be opened with the first sample.
        if dataset.dataset_index is not None:
            numbers = numbers[(numbers >= 0) & (numbers < len(dataset.dataset_index))]
            sources = np.asarray(dataset.dataset_index)[numbers]
            own = np.asarray(dataset.dataset_sample_index)[numbers].astype(np.int64)
            for source in np.unique(sources).tolist():
                yield from _by_dataset(dataset.datasets[source], own[sources == source])
        return
    reader = getattr(getattr(dataset, "dataset", None), "bin_reader", None)
    if not isinstance(dataset, GPTDataset) or not isinstance(reader, BinReader):
        return
    # Indices of a class of one's own may mean anything.
    if getattr(type(dataset), _BUILD) is not getattr(GPTDataset, _BUILD):
        return
    if dataset.shuffle_index is not None:
        numbers = numbers[(numbers >= 0) & (numbers < len(dataset.shuffle_index))]
        if len(numbers):
            yield dataset, numbers


_of_datasets: ByIdentity[ReadAhead] = ByIdentity()


def samples(dataset: Any, indices: Sequence[int | None]) -> list[Any]:
    """The samples of a batch; takes the place of ``__getitems__``, which a `DataLoader` calls."""
    ahead = _of_datasets.get(dataset)
    if ahead is None or not ahead.is_here:
        ahead = ReadAhead()
        _of_datasets.set(dataset, ahead)
    return ahead.samples(dataset, indices)
