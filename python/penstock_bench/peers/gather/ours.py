"""`penstock.features`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from penstock import features
from penstock.offload import TensorIO
from penstock_bench.peers.gather.base import KEY, Gatherer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    _Array = np.ndarray[Any, Any]

    from penstock.features import PendingRows
    from penstock.features.cache import Policy
    from penstock_bench.peers.gather.base import Setting


class Ours(Gatherer):
    """The table as it is.

    Args:
        window: Batches that `stream` knows ahead; None for calls by themselves.
        ahead: Of such calls, how many are begun before the one that is waited for.
        policy: Of the cache, where there is one.
        is_checked: Whether rows are compared with their checksums.
        gap_bytes: Between rows, what is rather read than left out.
        threads: Has so many threads read, one request each, in place of io_uring.
    """

    def __init__(
        self,
        *,
        window: int | None = 8,
        ahead: int = 1,
        policy: Policy = "sieve",
        is_checked: bool = True,
        gap_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        self._window = window
        self._ahead = ahead
        self._policy = policy
        self._is_checked = is_checked
        self._gap_bytes = gap_bytes
        self._threads = threads

    def open(self, setting: Setting, batches: Sequence[_Array]) -> None:
        """The table, and a cache where there is memory for one."""
        cache = None
        if setting.cache_bytes:
            cache = features.Cache(setting.cache_bytes, self._policy)
        io = None
        if self._threads is not None:
            io = TensorIO(engine="threads", io_threads=2, queue_depth=self._threads // 2)
        self._table = features.open(
            setting.table, KEY, cache=cache, check=self._is_checked, gap_bytes=self._gap_bytes,
            io=io,
        )  # fmt: skip

    def gather(self, batches: Sequence[_Array]) -> Iterator[_Array]:
        """Batch after batch, the next ones on their way."""
        if self._window is not None:
            for _, rows in self._table.stream(batches, window=self._window):
                yield rows
            return
        pending: deque[PendingRows] = deque()
        for ids in batches:
            pending.append(self._table.gather_async(ids))
            if len(pending) > self._ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    def counts(self) -> dict[str, int]:
        """As it counts itself."""
        stats = self._table.stats()
        return {
            "requests": stats.requests,
            "hits": stats.hits + stats.shared,
            "read_rows": stats.read_rows,
            "asked_bytes": stats.read_bytes,
        }

    def report(self) -> dict[str, Any]:
        """How it read."""
        stats = self._table.stats()
        words = [stats.engine, "checked" if stats.is_checked else "not checked"]
        notes = list(map(str, stats.fallbacks))
        self._table.close()
        return {"is_direct": stats.direct, "setup": ", ".join(words), "notes": notes}
