"""The Rust engine as Python sees it; private to the package."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, final

from penstock.tensors.devices import DeviceStream
from penstock.tensors.native_rows import (
    Fill,
    Grouped,
    Linked,
    LoadTarget,
    NativeArray,
    TensorSource,
    TensorTarget,
)

__all__ = [
    "CHUNK_BYTES",
    "FORMAT_VERSION",
    "MANIFEST",
    "OBJECT_SCHEMES",
    "PREVIOUS_MAX",
    "TABLE_MANIFEST",
    "Arena",
    "Attempt",
    "AttemptKey",
    "Bench",
    "BlockOpener",
    "BlockSealer",
    "BoxEntry",
    "CachingHostAllocator",
    "Checkpoint",
    "DataFile",
    "DeviceRowBatch",
    "EphemeralKey",
    "EventFd",
    "Executor",
    "FileSeal",
    "FileTimes",
    "FrozenTable",
    "GatherCounts",
    "GroupEntry",
    "HeaderTensor",
    "HostBuffer",
    "Identities",
    "Job",
    "Listener",
    "MirrorJob",
    "MissingTensor",
    "Moment",
    "NewRowTable",
    "NodeNumbers",
    "Question",
    "Questions",
    "RangeReader",
    "Recipients",
    "RowBatch",
    "RowCache",
    "RowIndex",
    "RowProxy",
    "RowReader",
    "RowServing",
    "RowTable",
    "RowTableForm",
    "Share",
    "Signers",
    "SigningKeys",
    "SmallGathers",
    "Store",
    "SurveyedTensor",
    "TensorEntry",
    "Transfer",
    "TransferCounts",
    "block_checks",
    "check_stream",
    "chunk_digests",
    "combine_digests",
    "copy_side_by_side",
    "cuda_problem",
    "digests",
    "draw_edges",
    "dtypes",
    "fifo_header",
    "generate_key",
    "has_file",
    "header_end",
    "header_types",
    "is_part_file",
    "list_names",
    "measure_link",
    "measure_packing",
    "measure_pinning",
    "measure_posts",
    "mirror",
    "open",
    "order_of_sizes",
    "parse_header",
    "parse_step",
    "part_file",
    "pinned_bytes",
    "probe_bucket",
    "probe_copies",
    "probe_directory",
    "probe_gpus",
    "probe_io_uring",
    "probe_names",
    "probe_watch",
    "rank_of_file",
    "reach",
    "read_recipients",
    "read_start",
    "remove_checkpoint",
    "reserve",
    "rewrap",
    "row_table_form",
    "salvage",
    "save",
    "shard_file",
    "sign",
    "signature_files",
    "stat",
    "step_directory",
    "survey",
    "trace_begin",
    "trace_forget",
    "trace_is_on",
    "trace_now",
    "trace_overlapping",
    "trace_span",
    "trace_start",
    "trace_stop",
    "verify",
]

CHUNK_BYTES: Final[int]
PREVIOUS_MAX: Final[int]
FORMAT_VERSION: Final[int]
MANIFEST: Final[str]
OBJECT_SCHEMES: Final[list[str]]
TABLE_MANIFEST: Final[str]

_Progress: TypeAlias = Callable[[int, int], object] | None

class _Kms(Protocol):
    def encrypt(self, uri: str, key: bytes) -> bytes: ...
    def decrypt(self, uri: str, encrypted: bytes) -> bytes: ...

_View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
_Alias: TypeAlias = tuple[str, int, _View | None]
_Beside: TypeAlias = tuple[str, bytes]

@final
class HostBuffer:
    nbytes: Final[int]
    def __len__(self) -> int: ...
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class TensorEntry:
    def __new__(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        file: str,
        begin: int,
        end: int,
    ) -> TensorEntry: ...
    name: Final[str]
    dtype: Final[str]
    shape: Final[tuple[int, ...]]
    file: Final[str]
    begin: Final[int]
    end: Final[int]

@final
class BoxEntry:
    index: Final[int]
    tensor: Final[str]
    shape: Final[tuple[int, ...]]
    start: Final[tuple[int, ...]]

@final
class GroupEntry:
    index: Final[int]
    group: Final[str]
    name: Final[str]

@final
class MissingTensor:
    name: Final[str]
    dtype: Final[str]
    shape: Final[tuple[int, ...]]
    reason: Final[str]
    kind: Final[str]
    rank: Final[int | None]

@final
class SurveyedTensor:
    name: Final[str]
    dtype: Final[str]
    shape: Final[tuple[int, ...]]
    bytes: Final[int]
    hit: Final[str | None]
    rank: Final[int | None]
    is_vouched_for: Final[bool]

@final
class HeaderTensor:
    name: Final[str]
    kind: Final[str]
    dtype: Final[str | None]
    shape: Final[tuple[int, ...]]
    begin: Final[int]
    end: Final[int]

@final
class TransferCounts:
    bytes: Final[int]
    staged_bytes: Final[int]
    cached_bytes: Final[int]
    device_bytes: Final[int]
    seconds: Final[float]

@final
class GatherCounts:
    rows: Final[int]
    hits: Final[int]
    shared: Final[int]
    read_rows: Final[int]
    requests: Final[int]
    read_bytes: Final[int]
    read_again: Final[int]

@final
class RowTableForm:
    def __new__(
        cls,
        rows: int,
        row_bytes: int,
        value_bytes: int,
        piece_rows: int,
    ) -> RowTableForm: ...
    rows: Final[int]
    row_bytes: Final[int]
    value_bytes: Final[int]
    piece_rows: Final[int]

@final
class Checkpoint:
    path: Final[str]
    id: Final[str]
    step: Final[int | None]
    format_version: Final[int]
    previous: Final[list[str]]
    created: Final[str]
    writer: Final[str]
    world_size: Final[int]
    metadata: Final[str]
    tree: Final[str]
    def rank_tree(self, rank: int) -> str: ...
    def offsets(self) -> list[tuple[int, int]]: ...
    def boxes(self) -> list[BoxEntry]: ...
    def carried(self) -> list[int]: ...
    def grouped(self) -> list[GroupEntry]: ...
    partial: Final[tuple[str | None, bool] | None]
    def missing(self) -> list[MissingTensor]: ...
    recipients: Final[list[str] | None]
    is_closed: Final[bool]
    nbytes: Final[int]
    def sidecar(self, name: str) -> bytes | None: ...
    def release(self) -> None: ...
    def files(self) -> list[tuple[str, int]]: ...
    def tensors(self) -> list[TensorEntry]: ...
    def aliases(self) -> list[_Alias]: ...
    def load(
        self,
        indices: list[int] | None,
        targets: dict[int, LoadTarget] | None,
        *,
        options: dict[str, object],
        progress: _Progress,
    ) -> tuple[list[HostBuffer], list[tuple[int, int] | None], dict[str, Any]]: ...
    def fill(
        self, requests: list[Fill], *, options: dict[str, object], progress: _Progress
    ) -> dict[str, Any]: ...
    def check(
        self,
        file: str,
        start: int,
        pieces: list[TensorTarget],
        wanted: tuple[int, int],
    ) -> None: ...
    def open_chunks(
        self,
        file: str,
        start: int,
        pieces: list[TensorTarget],
        wanted: tuple[int, int],
    ) -> None: ...
    def file_seal(self, file: str) -> FileSeal | None: ...
    def open_blocks(self, file: str, tags: NativeArray) -> BlockOpener: ...

@final
class BlockSealer:
    def __new__(cls, header_bytes: int, block_bytes: int) -> BlockSealer: ...
    def seal(self, first: int, memory: TensorTarget) -> bytes: ...

@final
class FileSeal:
    def __new__(cls, nbytes: int, header_bytes: int) -> FileSeal: ...
    def seal(self, first: int, memory: TensorTarget) -> None: ...
    def open(self, first: int, memory: TensorTarget) -> int | None: ...

@final
class BlockOpener: ...

@final
class Arena:
    def __new__(cls, budget_bytes: int | None, sharers: int = 1) -> Arena: ...
    def release(self) -> None: ...
    nbytes: Final[int]

@final
class Attempt:
    @staticmethod
    def begin(path: str, *, overwrite: bool) -> Attempt: ...
    @staticmethod
    def join(path: str, attempt_id: str) -> Attempt: ...
    id: Final[str]
    path: Final[str]
    def seal(self, key: AttemptKey) -> None: ...
    def sign(self, keys: SigningKeys) -> None: ...
    def follow(self, previous: Sequence[str]) -> None: ...
    def commit(
        self,
        parts: Sequence[tuple[int, str, int, int] | tuple[int, str, int, int, str]],
        *,
        step: int | None,
        metadata: str,
        overwrite: bool,
        files: list[_Beside] = ...,
        index: str | None = None,
    ) -> dict[str, Any]: ...
    def voted_tensors(
        self, part: tuple[int, str, int, int] | tuple[int, str, int, int, str]
    ) -> str: ...
    def is_committed(self) -> bool: ...
    def abandon(self) -> None: ...
    def discard(self) -> None: ...

@final
class Bench:
    def __new__(cls, job: str) -> Bench: ...
    nbytes: Final[int]
    def run(self, start_at: float) -> str: ...

@final
class Job:
    def __new__(
        cls,
        path: str,
        tensors: list[TensorSource],
        aliases: list[_Alias],
        tree: str,
        *,
        linked: Linked | None = None,
        grouped: list[Grouped] = ...,
        options: dict[str, object],
        arena: Arena | None,
        lazy: bool,
        nice: int | None,
        watched: bool = False,
        eager: list[int] = ...,
        sealed: bool = False,
        hashed: bool = False,
    ) -> Job: ...
    is_lazy: Final[bool]
    is_on_device: Final[bool]
    snapshots: Final[list[int]]
    def hold(self, streams: list[DeviceStream]) -> None: ...
    def stage(self) -> None: ...
    def wait_staged(self, timeout_seconds: float | None) -> bool: ...
    is_staged: Final[bool]
    def write(self, attempt: Attempt, rank: int) -> dict[str, Any]: ...
    def write_shards(self, attempt: Attempt, rank: int) -> None: ...
    def write_part(self, attempt: Attempt, tree: str | None) -> dict[str, Any]: ...
    def progress(self) -> tuple[int, int]: ...
    def cancel(self) -> None: ...

@final
class MirrorJob:
    def __new__(cls) -> MirrorJob: ...
    def run(
        self,
        path: str,
        url: str,
        *,
        sealing: AttemptKey | None,
        bytes_per_second: int | None,
        connections: int | None,
        nice: int | None,
        options: dict[str, object],
    ) -> dict[str, Any]: ...
    def cancel(self) -> None: ...
    def leave(self) -> None: ...
    def bytes(self) -> tuple[int, int]: ...

@final
class Store:
    def __new__(cls, root: str) -> Store: ...
    def step_path(self, step: int) -> str: ...
    def identity(self, step: int) -> str | None: ...
    def lineage(self, step: int) -> tuple[str, list[str]] | None: ...
    def copy_of(self, step: int) -> str | None: ...
    def steps(self) -> list[tuple[int, str, str | None]]: ...
    def newest(
        self, *, last: int | None = None
    ) -> tuple[list[tuple[int, str, str | None]], Checkpoint | None]: ...
    def state(self, step: int) -> str | None: ...
    def committed(self) -> list[int]: ...
    def newest_complete(self, *, below: int | None = None) -> int | None: ...
    def delete(self, step: int, *, force: bool) -> int: ...
    def protect(self, step: int) -> None: ...
    def unprotect(self, step: int) -> None: ...
    def protected(self) -> list[int]: ...
    def is_left_behind(self, step: int) -> bool | None: ...
    def sweep(self, *, dry_run: bool, min_age_seconds: int | None) -> list[tuple[str, int]]: ...
    def plan_retention(
        self, keep_last: int | None, keep_every: int | None, saved: int | None
    ) -> list[tuple[int, str | None, str | None, str | None]]: ...
    def retire(self, doomed: list[tuple[int, str]]) -> list[int]: ...
    def mark_verified(self, step: int, checkpoint_id: str) -> None: ...
    def mark_damaged(self, step: int, checkpoint_id: str) -> None: ...
    def scrub(
        self,
        *,
        bytes_per_second: int | None,
        max_age_seconds: float | None,
        options: dict[str, object],
        progress: _Progress,
    ) -> dict[str, Any]: ...
    def quarantine(self, step: int) -> str | None: ...
    def make_way(self, step: int) -> str | None: ...
    def quarantined(self) -> list[tuple[int, str]]: ...
    def retire_quarantined(self) -> list[str]: ...
    @staticmethod
    def step_of(name: str) -> int | None: ...
    def marks(self) -> list[tuple[int, str, int, bool]]: ...

def save(
    path: str,
    tensors: list[TensorSource],
    aliases: list[_Alias],
    tree: str,
    *,
    linked: Linked | None = None,
    grouped: list[Grouped] = ...,
    step: int | None,
    metadata: str,
    overwrite: bool,
    files: list[_Beside] = ...,
    index: str | None = None,
    sealing: AttemptKey | None = None,
    signing: SigningKeys | None = None,
    previous: Sequence[str] = ...,
    options: dict[str, object],
    progress: _Progress,
) -> dict[str, Any]: ...
def open(
    path: str,
    identities: Identities | None = None,
    *,
    demanded: bool = False,
    sealed_ok: bool = False,
    signers: Signers | None = None,
) -> Checkpoint: ...
def verify(
    path: str,
    *,
    options: dict[str, object],
    progress: _Progress,
    signers: Signers | None = None,
) -> dict[str, Any]: ...
def sign(
    path: str, keys: SigningKeys, *, options: dict[str, object], progress: _Progress
) -> dict[str, Any]: ...
def mirror(
    path: str,
    url: str,
    *,
    sealing: AttemptKey | None,
    bytes_per_second: int | None,
    connections: int | None,
    options: dict[str, object],
    progress: _Progress,
) -> dict[str, Any]: ...
def survey(
    path: str,
    identities: Identities | None = None,
    *,
    demanded: bool = False,
    options: dict[str, object],
    progress: _Progress,
) -> dict[str, Any]: ...
def stat(path: str) -> tuple[str, int] | None: ...
def has_file(path: str) -> bool: ...
def list_names(path: str) -> list[str]: ...
def read_start(path: str, bytes: int) -> bytes: ...

@final
class Questions:
    def __new__(cls) -> Questions: ...
    def listen(self) -> Listener: ...

@final
class Listener:
    def next(self) -> Question | None: ...

@final
class Question:
    def answer(self, row: tuple[str, str, str | None, float | None]) -> None: ...
    def refuse(self, reason: str) -> None: ...

def reach(
    url: str,
    *,
    endpoint: str | None,
    region: str | None,
    keys: tuple[str, str, str | None, float | None] | None,
    questions: Questions | None,
    part_bytes: int | None,
    connections: int | None,
    patience_seconds: int | None,
    checksums: bool | None,
) -> None: ...
def probe_bucket(url: str) -> list[tuple[str, str, str, str | None]]: ...
def step_directory(step: int) -> str: ...
def parse_step(name: str) -> int | None: ...
def part_file(rank: int, attempt_id: str) -> str: ...
def is_part_file(name: str) -> bool: ...
def signature_files(checkpoint_id: str) -> list[str]: ...
def row_table_form(home: str) -> tuple[RowTableForm, str]: ...
def rank_of_file(name: str) -> int | None: ...
def shard_file(rank: int, index: int, attempt_id: str) -> str: ...
def cuda_problem() -> str | None: ...
def fifo_header() -> str: ...
def generate_key(path: str, kind: str) -> str: ...
def read_recipients(path: str) -> list[tuple[str, str]]: ...
def rewrap(
    path: str,
    identities: Identities | None = None,
    recipients: Recipients | None = None,
    *,
    removed: list[str] = ...,
    replaces: bool = False,
) -> list[tuple[str, str]]: ...
def digests(tensors: list[TensorSource]) -> list[int]: ...
def chunk_digests(tensor: TensorSource) -> list[int]: ...
def block_checks(array: NativeArray) -> bytes: ...
def check_stream(device: DeviceStream) -> None: ...
def combine_digests(first: int, second: int, second_bytes: int) -> int: ...
def dtypes() -> list[tuple[str, int]]: ...
def header_end(path: str, start: bytes, nbytes: int) -> int: ...
def header_types() -> list[tuple[str, str, int]]: ...
def parse_header(
    path: str, start: bytes, nbytes: int
) -> tuple[int, dict[str, str], list[HeaderTensor]]: ...
def salvage(
    path: str,
    out: str,
    identities: Identities | None = None,
    *,
    demanded: bool = False,
    sealing: AttemptKey | None = None,
    unverified: bool,
    options: dict[str, object],
    progress: _Progress,
) -> dict[str, Any]: ...
def probe_gpus(only: int | None) -> str: ...
def probe_copies(device: int) -> str: ...
def measure_link(device: int, job: str) -> str: ...
def measure_packing(device: int, rows: int, row_bytes: int, count: int) -> float: ...
def measure_pinning(device: int, nbytes: int) -> str: ...
def measure_posts(device: int, warps: int, posts: int) -> float: ...
def pinned_bytes() -> int: ...
def probe_directory(path: str) -> dict[str, Any]: ...
def probe_io_uring() -> list[tuple[str, int | None, str | None]]: ...
def probe_names(path: str) -> list[tuple[str, int | None, str | None]]: ...
def probe_watch() -> str | None: ...
def trace_start(path: str, *, order: int, name: str, about: str, is_shared: bool) -> None: ...
def trace_stop() -> None: ...
def trace_forget() -> None: ...
def trace_is_on() -> bool: ...
def trace_now() -> int: ...
def trace_begin() -> int: ...
def trace_span(
    name: str, start_ns: int, detail: str | None = None, end_ns: int | None = None
) -> None: ...
def trace_overlapping(
    role: str, name: str, start_ns: int, detail: str | None = None, end_ns: int | None = None
) -> None: ...
def remove_checkpoint(path: str, *, force: bool, foreign: bool) -> int: ...
def reserve(nbytes: int, early_bytes: int) -> HostBuffer: ...
def order_of_sizes(sizes: Sequence[int]) -> list[int]: ...
def copy_side_by_side(
    sources: Sequence[tuple[int, int, int, object]], target: HostBuffer, threads: int
) -> None: ...

@final
class DataFile:
    @staticmethod
    def open(path: str, to_write: bool, direct: str) -> DataFile: ...
    @staticmethod
    def of_descriptor(fd: int, direct: str) -> DataFile: ...
    path: Final[str]
    nbytes: Final[int]
    direct: Final[bool]
    writable: Final[bool]
    suited: Final[tuple[int, int, int]]
    fallback: Final[str | None]

@final
class Executor:
    def __new__(
        cls,
        *,
        engine: str,
        workers: int,
        queue_depth: int,
        in_flight_bytes: int,
        block_bytes: int,
        staging_bytes: int,
    ) -> Executor: ...
    engine: Final[str]
    fallback: Final[str | None]
    unpinned: Final[str | None]
    def share(self, weight: int) -> Share: ...
    def close(self) -> None: ...

@final
class Share:
    def read(
        self,
        requests: list[tuple[DataFile, int, NativeArray]],
        on_devices: list[tuple[DataFile, int, NativeArray, DeviceStream]],
    ) -> Transfer: ...
    def write(
        self,
        requests: list[tuple[DataFile, int, NativeArray]],
        on_devices: list[tuple[DataFile, int, NativeArray, DeviceStream]],
        durable: bool,
    ) -> Transfer: ...

@final
class Transfer:
    def done(self) -> bool: ...
    def wait(self, timeout_seconds: float | None) -> TransferCounts | None: ...
    def cancel(self) -> None: ...
    def ring(self, event_fd: EventFd, key: int) -> None: ...

@final
class EventFd:
    def __new__(cls) -> EventFd: ...
    def fileno(self) -> int: ...
    def take(self) -> list[int]: ...

@final
class RowCache:
    def __new__(cls, slots: int, row_bytes: int, policy: str) -> RowCache: ...

@final
class RowIndex:
    def __new__(cls, slots: int, policy: str) -> RowIndex: ...
    def replay(self, keys: NativeArray, batch_keys: int, window: int) -> int: ...
    def pin(self, keys: NativeArray) -> int: ...

@final
class NodeNumbers:
    def __new__(cls, first: NativeArray) -> NodeNumbers: ...
    def number(self, nodes: NativeArray, numbers: TensorTarget) -> None: ...
    def copy_nodes(self, first: int, out: TensorTarget) -> None: ...
    def __len__(self) -> int: ...

def draw_edges(
    begin: NativeArray,
    degrees: NativeArray,
    count: int | None,
    is_replaced: bool,
    shares: NativeArray,
    first_node: int,
    nodes: TensorTarget,
    edges: TensorTarget,
) -> None: ...

@final
class RowReader:
    def __new__(
        cls,
        executor: Executor,
        weight: int,
        segments: list[tuple[DataFile, int, int]],
        *,
        row_bytes: int,
        value_bytes: int,
        checks: NativeArray | None,
        openers: list[BlockOpener] | None = None,
        cache: RowCache | None,
        gap_bytes: int,
        run_bytes_max: int,
    ) -> RowReader: ...
    def gather(
        self, ids: NativeArray, is_signed: bool, out: TensorTarget, hinted: int | None
    ) -> RowBatch: ...
    def gather_to_device(
        self,
        ids: NativeArray,
        is_signed: bool,
        out: NativeArray,
        device: DeviceStream,
        hinted: int | None,
    ) -> DeviceRowBatch: ...
    def finish_devices(self) -> None: ...
    def device_copies(self) -> tuple[int, str | None]: ...
    def hint(self, ids: NativeArray, is_signed: bool) -> int | None: ...
    def forget(self, hinted: int) -> None: ...
    def pin(self, ids: NativeArray, is_signed: bool) -> int | None: ...
    def unpin(self, ids: NativeArray, is_signed: bool) -> None: ...
    def counts(self) -> GatherCounts: ...

@final
class FileTimes:
    def __new__(cls, files: list[tuple[str, tuple[int, int, int, int, int]]]) -> FileTimes: ...
    def are_unchanged(self) -> bool: ...
    def accept(self, index: int, mark: tuple[int, int, int, int, int]) -> None: ...

@final
class SmallGathers:
    def __new__(
        cls,
        reader: RowReader,
        array_type: type,
        dtype: object | None,
        row_sizes: Sequence[int],
        allocator: CachingHostAllocator,
        files: FileTimes,
    ) -> SmallGathers: ...
    def add_tensors(self, tensor_type: type, example: object) -> None: ...
    def gather(
        self, ids: object, out: object | None = None
    ) -> tuple[Any, RowBatch | None] | None: ...

@final
class RangeReader:
    def __new__(
        cls,
        executor: Executor,
        weight: int,
        file: DataFile,
        *,
        gap_bytes: int,
        run_bytes_max: int,
    ) -> RangeReader: ...
    def read(self, ranges: NativeArray, out: TensorTarget) -> Transfer: ...
    def counts(self) -> GatherCounts: ...

@final
class Recipients:
    def __new__(cls, keys: list[tuple[str, str, bytes]], kms: _Kms | None) -> Recipients: ...
    def names(self) -> list[str]: ...
    def draw(self) -> AttemptKey: ...
    def wrap(self, key: AttemptKey) -> str: ...

@final
class Identities:
    def __new__(cls, keys: list[tuple[str, str, bytes]], kms: _Kms | None) -> Identities: ...
    def count(self) -> int: ...
    def open(self, wraps: str) -> AttemptKey: ...

@final
class SigningKeys:
    def __new__(cls, keys: list[tuple[str, str, bytes]]) -> SigningKeys: ...
    def signers(self) -> list[str]: ...

@final
class Signers:
    def __new__(cls, keys: list[tuple[str, str, bytes]]) -> Signers: ...
    def count(self) -> int: ...

@final
class AttemptKey:
    def wraps(self) -> str: ...
    def wrap_for(self, recipient: str) -> str: ...

@final
class EphemeralKey:
    def __new__(cls) -> EphemeralKey: ...
    recipient: Final[str]
    def open(self, wrap: str, wraps: str) -> AttemptKey: ...

@final
class Moment:
    def __new__(cls, device: DeviceStream) -> Moment: ...
    def done(self) -> bool: ...
    def wait(self) -> None: ...
    def before_fills(self) -> None: ...
    def before_work(self, device: DeviceStream) -> None: ...

@final
class RowProxy:
    def __new__(cls, reader: RowReader, ordinal: int, staging_bytes: int) -> RowProxy: ...
    def gather(
        self, device: DeviceStream, ids: int, id_bytes: int, count: int, out: int
    ) -> None: ...
    def check(self) -> None: ...
    def serve(self) -> RowServing: ...
    def fifo(self) -> tuple[int, int, int]: ...
    def close(self) -> None: ...

@final
class RowServing:
    def end(self, device: DeviceStream) -> None: ...

@final
class NewRowTable:
    def __new__(
        cls,
        executor: Executor,
        weight: int,
        home: str,
        form: RowTableForm,
        note: str,
        direct: str,
    ) -> NewRowTable: ...
    def append(self, rows: NativeArray) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...

@final
class RowTable:
    def __new__(
        cls,
        executor: Executor,
        weight: int,
        home: str,
        *,
        direct: str,
        cache: RowCache | None,
        gap_bytes: int,
        run_bytes_max: int,
        log_bytes: int,
        record_bytes: int,
    ) -> RowTable: ...
    def look_up(self, ids: NativeArray, is_signed: bool, out: TensorTarget) -> RowBatch: ...
    def update(self, ids: NativeArray, is_signed: bool, rows: NativeArray) -> None: ...
    def flush(self) -> None: ...
    def freeze(self) -> FrozenTable: ...
    def logged(self) -> tuple[int, int]: ...
    def counts(self) -> GatherCounts: ...
    def close(self) -> None: ...

@final
class FrozenTable:
    def read(self, piece: int, out: TensorTarget) -> None: ...
    def compact(self) -> tuple[int, int, int]: ...
    def close(self) -> None: ...

@final
class DeviceRowBatch:
    def done(self) -> bool: ...
    def wait(self, timeout_seconds: float | None) -> bool: ...
    def hold(self, stream: int) -> None: ...
    def ring(self, event_fd: EventFd, key: int) -> None: ...

@final
class RowBatch:
    def done(self) -> bool: ...
    def wait(self, timeout_seconds: float | None) -> bool: ...
    def ring(self, event_fd: EventFd, key: int) -> None: ...

@final
class CachingHostAllocator:
    def __new__(cls, budget_bytes: int, locked: bool) -> CachingHostAllocator: ...
    def take(self, nbytes: int) -> HostBuffer: ...
    def release(self) -> None: ...
    taken_bytes: Final[int]
    free_bytes: Final[int]
