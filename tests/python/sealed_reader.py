"""A reader of sealed checkpoints, on the primitives of `cryptography`.

Written from section 9 of `docs/format.md` alone, whose paragraphs it cites, as `format_reader` is
from the others. It knows no recipients: the test gives it the data key.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from format_reader import CHUNK_BYTES, STAMP_BYTES, Checkpoint

if TYPE_CHECKING:
    from pathlib import Path

TAG_BYTES = 16


class SealError(Exception):
    """The checkpoint is not sealed with this key, or was tampered with."""


class SealedCheckpoint(Checkpoint):
    """A sealed checkpoint of one rank, opened with its data key."""

    def __init__(self, path: Path, data_key: bytes) -> None:
        self.data_key = data_key
        self.opened: list[bytes] = []
        super().__init__(path)

    def _read_part(self, entry: dict[str, Any]) -> dict[str, Any]:
        self._open_manifest()
        text = (self.path / entry["file"]).read_bytes()
        _require(hashlib.sha256(text).hexdigest() == entry["sha256"], "9.4: SHA-256")
        part = super()._read_part(entry)
        _require(part["tensors"] == part["aliases"] == [] and "missing" not in part, "9.5")
        _require(part["tree"] == {"$": "sealed"}, "9.5: tree")
        sealed = part["sealed"]
        self.salt = base64.b64decode(sealed["salt"])
        rank = struct.pack("<I", part["rank"])
        key, nonce, commitment = self._keys("penstock.v1.part", self.salt, rank)
        _require(base64.b64decode(sealed["commitment"]) == commitment, "9.5: commitment")
        body = _decrypt(key, nonce, base64.b64decode(sealed["body"]), b"", "9.5: body")
        return {**part, **json.loads(body)}

    def _read_shard(self, file: dict[str, Any]) -> bytes:
        data = super()._read_shard(file)
        number = [row["name"] for row in self._files()].index(file["name"])
        _require(file["name"].startswith(f"shard-00000-{number:02}."), "9.5: names")
        sealed = file["sealed"]
        header_bytes = sealed["header_bytes"]
        if "blocks" in sealed:
            self.opened.append(self._open_blocks(data, number, sealed))
            return self.opened[-1]
        _require(0 <= header_bytes <= min(CHUNK_BYTES, len(data)), "9.5: header_bytes")
        if "key" in sealed:
            key, nonce, commitment = self._keys_of_file(number, len(data), sealed)
        else:
            place = struct.pack("<IIQQQ", 0, number, len(data), header_bytes, CHUNK_BYTES)
            key, nonce, commitment = self._keys("penstock.v1.shard", self.salt, place)
        _require(base64.b64decode(sealed["commitment"]) == commitment, "9.5: commitment")
        tags = base64.b64decode(sealed["tags"])
        chunks = range(0, len(data), CHUNK_BYTES)
        _require(len(tags) == TAG_BYTES * len(chunks), "9.5: tags")
        opened = data[:header_bytes]
        for index, start in enumerate(chunks):
            chunk = data[start : start + CHUNK_BYTES]
            header = chunk[:header_bytes] if index == 0 else b""
            tag = tags[TAG_BYTES * index :][:TAG_BYTES]
            opened += _decrypt(
                key, _counted(nonce, index), chunk[len(header) :] + tag, header, f"9.6: {index}"
            )
        self.opened.append(opened)
        return opened

    def _open_blocks(self, data: bytes, number: int, sealed: dict[str, Any]) -> bytes:
        """9.10: a file that is sealed by blocks; its tags are in a tensor of a file before it."""
        header_bytes, block_bytes = sealed["header_bytes"], sealed["blocks"]["block_bytes"]
        _require(sealed["tags"] == "", "9.10: tags")
        file_key = self._file_key(number, sealed["blocks"]["key"])
        info = b"penstock.v1.blocks\0" + struct.pack("<QQ", header_bytes, block_bytes)
        okm = HKDF(SHA256(), 76, bytes(32), info).derive(file_key)
        _require(base64.b64decode(sealed["commitment"]) == okm[44:], "9.10: commitment")
        tags = self._tags_of(number)
        blocks = range(header_bytes, len(data), block_bytes)
        _require(len(tags) == TAG_BYTES * len(blocks), "9.10: number of tags")
        opened = data[:header_bytes]
        for index, start in enumerate(blocks):
            block = data[start : start + block_bytes] + tags[TAG_BYTES * index :][:TAG_BYTES]
            opened += _decrypt(okm[:32], _counted(okm[32:44], index), block, b"", f"9.10: {index}")
        return opened

    def _keys_of_file(
        self, number: int, file_bytes: int, sealed: dict[str, Any]
    ) -> tuple[bytes, bytes, bytes]:
        """9.11: the keys of a file that is sealed by chunks with a key of its own."""
        _require("blocks" not in sealed, "9.11")
        numbers = struct.pack("<QQQ", file_bytes, sealed["header_bytes"], CHUNK_BYTES)
        info = b"penstock.v1.chunks\0" + numbers
        file_key = self._file_key(number, sealed["key"])
        okm = HKDF(SHA256(), 76, bytes(32), info).derive(file_key)
        return okm[:32], okm[32:44], okm[44:]

    def _file_key(self, number: int, wrapped: str) -> bytes:
        """9.10: the key of a file, encrypted for its place in the part."""
        place = struct.pack("<II", 0, number)
        wrapping, nonce, _ = self._keys("penstock.v1.file", self.salt, place)
        file_key = _decrypt(wrapping, nonce, base64.b64decode(wrapped), b"", "9.10: key")
        _require(len(file_key) == 32, "9.10: key")
        return file_key

    def _tags_of(self, number: int) -> bytes:
        rows = {row["name"]: row for row in self.part["tensors"]}
        (name,) = [name for name, row in rows.items() if row["file"] == number]
        note = self.metadata["penstock.features"][name]["seals"]
        _require((note["cipher"], note["block_bytes"]) == ("aes256gcm", 4096), "9.10: seals")
        row = rows[note["tensor"]]
        begin, end = row["range"]
        return self.opened[row["file"]][begin:end]

    def _files(self) -> list[dict[str, Any]]:
        files: list[dict[str, Any]] = self.part["files"]
        return files

    def _open_manifest(self) -> None:
        """9.3, 9.4: the commitment and the MAC of a manifest, and its metadata."""
        manifest = self.manifest
        sealing = manifest["sealing"]
        _require(sealing["cipher"] == "AES-256-GCM" and manifest["metadata"] == {}, "9.3")
        text = (self.path / "manifest.json").read_bytes()[:-STAMP_BYTES]
        covered, _, rest = text.partition(b',"mac":"')
        _require(re.fullmatch(rb'[A-Za-z0-9+/]{43}=","wraps":\[.*\]', rest) is not None, "9.3")
        salt = base64.b64decode(sealing["salt"])
        okm = self._derive("penstock.v1.manifest", salt, b"", 64)
        _require(base64.b64decode(sealing["commitment"]) == okm[:32], "9.4: commitment")
        mac = HMAC(okm[32:], SHA256())
        mac.update(covered)
        _require(base64.b64decode(manifest["mac"]) == mac.finalize(), "9.4: MAC")
        key, nonce, _ = self._keys("penstock.v1.metadata", salt, b"")
        sealed = base64.b64decode(sealing["metadata"])
        self.metadata = json.loads(_decrypt(key, nonce, sealed, b"", "9.3: metadata"))

    def _keys(self, label: str, salt: bytes, integers: bytes) -> tuple[bytes, bytes, bytes]:
        okm = self._derive(label, salt, integers, 76)
        return okm[:32], okm[32:44], okm[44:]

    def _derive(self, label: str, salt: bytes, integers: bytes, length: int) -> bytes:
        """9.2: bytes of HKDF-SHA-256."""
        _require(len(salt) == 32, "9.2: salt")
        info = label.encode() + b"\0" + self.manifest["id"].encode() + integers
        return HKDF(SHA256(), length, salt, info).derive(self.data_key)


def _counted(nonce: bytes, index: int) -> bytes:
    """9.6: the nonce of a chunk."""
    last = int.from_bytes(nonce[4:], "big") ^ index
    return nonce[:4] + last.to_bytes(8, "big")


def _decrypt(key: bytes, nonce: bytes, sealed: bytes, header: bytes, what: str) -> bytes:
    try:
        return AESGCM(key).decrypt(nonce, sealed, header)
    except InvalidTag:
        raise SealError(what) from None


def _require(holds: bool, paragraph: str) -> None:
    if not holds:
        raise SealError(paragraph)
