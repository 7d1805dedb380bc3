"""Forgeries: checkpoints with right digests and wrong contents."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from format_reader import CHUNK_BYTES, crc64, digest

if TYPE_CHECKING:
    from pathlib import Path


class Forgery:
    """A checkpoint to tamper with; the digests of its files are recomputed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_file = path / "manifest.json"
        self.manifest: dict[str, Any] = json.loads(self.manifest_file.read_bytes())
        self.part_file = path / self.manifest["parts"][0]["file"]
        self.part: dict[str, Any] = json.loads(self.part_file.read_bytes())

    def shard_file(self, index: int = 0) -> Path:
        return self.path / self.part["files"][index]["name"]

    def write_manifest(self) -> None:
        members = {key: value for key, value in self.manifest.items() if key != "digest"}
        self.write_manifest_text(encode(members)[:-1])

    def write_manifest_text(self, stamped: bytes) -> None:
        """Writes text without the closing brace; the stamp is added."""
        self.manifest_file.write_bytes(stamped + f',"digest":"{digest(stamped)}"}}\n'.encode())

    def write_part(self) -> None:
        self.write_part_text(encode(self.part) + b"\n")

    def write_part_text(self, text: bytes) -> None:
        self.part_file.write_bytes(text)
        self.manifest["parts"][0].update(bytes=len(text), digest=digest(text))
        self.write_manifest()

    def write_tree(self, tree: str) -> None:
        """Writes any text in the place of the tree."""
        members = {key: value for key, value in self.part.items() if key != "tree"}
        self.write_part_text(encode(members)[:-1] + b',"tree":' + tree.encode() + b"}\n")

    def write_shard(self, data: bytes, index: int = 0) -> None:
        self.shard_file(index).write_bytes(data)
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        self.part["files"][index].update(
            bytes=len(data),
            digest=digest(data),
            chunks=[f"{crc64(chunk):016x}" for chunk in chunks],
        )
        self.write_part()


def encode(value: Any) -> bytes:
    """Encodes JSON as Penstock's writer does."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
