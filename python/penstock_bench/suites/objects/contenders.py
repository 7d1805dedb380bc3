"""Who saves to a bucket and loads from it, as each one's documentation recommends for speed."""

from __future__ import annotations

import itertools
import os
import tempfile
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch

import penstock
from penstock_bench.harness import machine
from penstock_bench.suites.objects.server import KEY, REGION, SECRET

Setting = dict[str, Any]
State = dict[str, torch.Tensor]

SAVE, LOAD = "save", "load"

LOCAL, MIRRORED, COPYING = "local", "mirrored", "copying"
STORES = {
    LOCAL: "in a store on the disk",
    MIRRORED: "in one with a mirror at the server in memory",
    COPYING: "in that one while it copies the step before",
}

_MIB = 1 << 20

PRELOADED = (
    "torch.distributed.checkpoint.fsspec_filesystem",
    "s3fs",
    "s3torchconnector.dcp",
    "runai_model_streamer",
    "boto3",
    "safetensors.torch",
)
"""Modules that contenders import; none has threads or connections before it is used."""

# DCP warns at every call that it runs without torch.distributed, as it does here on purpose.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


def reach(endpoint: str) -> None:
    """Says in the environment where the store is and who asks: all of them read it there."""
    os.environ.update(
        AWS_ENDPOINT_URL=endpoint,
        AWS_REGION=REGION,
        AWS_ACCESS_KEY_ID=KEY,
        AWS_SECRET_ACCESS_KEY=SECRET,
        # Else clients of AWS ask for the credentials of an instance, for seconds.
        AWS_EC2_METADATA_DISABLED="true",
        # Run:ai's streamer: the bucket stands in the path, not in the name of the host.
        RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING="0",
    )


class Contender(ABC):
    """A library at one of its settings.

    All settings of an operation are tried, to find the best.
    """

    package: ClassVar[str]
    settings: ClassVar[dict[str, list[Setting]]] = {SAVE: [{}], LOAD: [{}]}

    def __init__(self, endpoint: str, setting: Setting) -> None:
        self.endpoint = endpoint
        self.setting = setting

    @classmethod
    def is_missing(cls) -> bool:
        """Whether it is not installed."""
        return machine.package_version(cls.package) is None

    @abstractmethod
    def save(self, url: str, state: State) -> None:
        """Saves; at its end the checkpoint is complete at the server."""

    def targets(self, empty: State) -> State | None:
        """Tensors for `load` to fill, made before the time; None where the library makes them."""
        return empty

    @abstractmethod
    def load(self, url: str, targets: State | None) -> State:
        """Loads; at its end all tensors are in memory."""

    def close(self) -> None:  # noqa: B027
        """Ends what `load` may not end, as its tensors lie there."""


class Penstock(Contender):
    """All defaults, every byte checked against its digest."""

    package = "penstock"

    @classmethod
    def is_missing(cls) -> bool:
        """Never: it may be that it is not installed, but imported from its sources."""
        return False

    def save(self, url: str, state: State) -> None:
        """`penstock.save`."""
        penstock.save(url, state)

    def targets(self, empty: State) -> None:
        """None: memory of its own."""

    def load(self, url: str, targets: State | None) -> State:
        """`penstock.load`, of some keys where the setting names them."""
        found: State = penstock.load(url, keys=self.setting.get("keys"))
        return found


class _Dcp(Contender):
    """DCP, by a writer and a reader of its own."""

    @abstractmethod
    def _writer(self, url: str) -> Any: ...

    @abstractmethod
    def _reader(self, url: str) -> Any: ...

    def save(self, url: str, state: State) -> None:
        """`dcp.save`."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(state, storage_writer=self._writer(url), no_dist=True)

    def load(self, url: str, targets: State | None) -> State:
        """`dcp.load`."""
        from torch.distributed.checkpoint.state_dict_loader import load

        assert targets is not None
        load(targets, storage_reader=self._reader(url), no_dist=True)
        return targets


class Connector(_Dcp):
    """DCP by S3StorageWriter and S3StorageReader of s3torchconnector."""

    package = "s3torchconnector"
    settings: ClassVar = {
        SAVE: [
            {"thread_count": threads, "part_mib": part, "target_gbps": 10.0}
            for threads, part in itertools.product((1, 2, 4, 8), (8, 16, 64))
        ]
        + [{"thread_count": 4, "part_mib": 8, "target_gbps": 100.0}],
        LOAD: [
            {"reader": reader, "part_mib": part, "target_gbps": 10.0}
            for reader, part in itertools.product(("dcp_optimized", "sequential"), (8, 16, 64))
        ]
        + [{"reader": "dcp_optimized", "part_mib": 8, "target_gbps": 100.0}],
    }

    def __init__(self, endpoint: str, setting: Setting) -> None:
        super().__init__(endpoint, setting)
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        # Its classes for DCP take no endpoint. One client for all calls: else each of them would
        # connect anew.
        self._client = S3Client(
            region=REGION,
            endpoint=endpoint,
            s3client_config=S3ClientConfig(
                throughput_target_gbps=setting["target_gbps"],
                part_size=setting["part_mib"] * _MIB,
                force_path_style=True,
            ),
        )

    def _writer(self, url: str) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        threads = self.setting.get("thread_count", 1)
        writer = S3StorageWriter(REGION, url, thread_count=threads)
        writer.fs._client = self._client
        return writer

    def _reader(self, url: str) -> Any:
        from s3torchconnector import S3ReaderConstructor
        from s3torchconnector.dcp import S3StorageReader

        kind = self.setting.get("reader", "dcp_optimized")
        reader = S3StorageReader(
            REGION, url, reader_constructor=getattr(S3ReaderConstructor, kind)()
        )
        reader.fs._client = self._client
        return reader


class Fsspec(_Dcp):
    """DCP by its FsspecWriter and FsspecReader, over s3fs."""

    package = "s3fs"
    settings: ClassVar = {
        SAVE: [
            {"thread_count": threads, "block_mib": block, "max_concurrency": requests}
            for threads, block, requests in itertools.product((1, 4), (8, 50), (10, 32))
        ],
        LOAD: [
            {"block_mib": block, "cache": cache}
            for block, cache in itertools.product((8, 50), ("readahead", "none"))
        ],
    }

    def _storage(self) -> dict[str, Any]:
        return {
            "endpoint_url": self.endpoint,
            "default_block_size": self.setting["block_mib"] * _MIB,
            "max_concurrency": self.setting.get("max_concurrency", 10),
            "default_cache_type": self.setting.get("cache", "readahead"),
        }

    def _writer(self, url: str) -> Any:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter

        threads = self.setting.get("thread_count", 1)
        return FsspecWriter(url, thread_count=threads, sync_files=False, **self._storage())

    def _reader(self, url: str) -> Any:
        from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader

        return FsspecReader(url, **self._storage())


class Streamer(Contender):
    """Run:ai's streamer, of one safetensors file: it only loads."""

    package = "runai-model-streamer"
    settings: ClassVar = {
        SAVE: [{}],
        LOAD: [
            {"concurrency": requests, "chunk_mib": chunk}
            for requests, chunk in itertools.product((8, 16, 32), (8, 16, 64))
        ],
    }

    def __init__(self, endpoint: str, setting: Setting) -> None:
        super().__init__(endpoint, setting)
        if setting:
            # Read by the library when a streamer starts.
            os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(setting["concurrency"])
            os.environ["RUNAI_STREAMER_CHUNK_BYTESIZE"] = str(setting["chunk_mib"] * _MIB)
        self._streamers: list[Any] = []

    def save(self, url: str, state: State) -> None:
        """A file is made and uploaded, for `load`; nobody times it."""
        import boto3
        from safetensors.torch import save_file

        bucket, _, key = url.removeprefix("s3://").partition("/")
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "model.safetensors"
            save_file(state, path)
            client = boto3.client("s3", endpoint_url=self.endpoint)
            client.upload_file(str(path), bucket, f"{key}/model.safetensors")

    def targets(self, empty: State) -> None:
        """None: memory of its own."""

    def load(self, url: str, targets: State | None) -> State:
        """Its tensors are the caller's, and stay where they are."""
        from runai_model_streamer import SafetensorsStreamer

        streamer = SafetensorsStreamer().__enter__()
        self._streamers.append(streamer)
        streamer.stream_file(f"{url}/model.safetensors")
        return dict(streamer.get_tensors())

    def close(self) -> None:
        """Ends its threads."""
        for streamer in self._streamers:
            streamer.__exit__(None, None, None)


PENSTOCK, CONNECTOR, FSSPEC, STREAMER = "penstock", "s3torchconnector", "dcp-s3fs", "runai"
CONTENDERS: dict[str, type[Contender]] = {
    PENSTOCK: Penstock,
    CONNECTOR: Connector,
    FSSPEC: Fsspec,
    STREAMER: Streamer,
}
