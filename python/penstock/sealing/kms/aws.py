"""AWS: ``aws-kms://arn:aws:kms:REGION:ACCOUNT:key/ID``, ``…:alias/NAME``, ``aws-kms://alias/NAME``.

Credentials, region and endpoint are those of boto3: environment, files, roles. A process needs
``kms:Encrypt`` to save and ``kms:Decrypt`` to load.
"""

from __future__ import annotations

from typing import Any

import boto3
import botocore.config

_CONTEXT = {"application": "penstock"}
"""The encryption context: it shows in CloudTrail, and policies can demand it.

It names no store, as checkpoints are copied and a key of a process serves all its stores.
"""


class Client:
    """Keys of AWS KMS."""

    def __init__(self) -> None:
        self._config = botocore.config.Config(
            connect_timeout=10,
            read_timeout=10,
            retries={"mode": "standard", "total_max_attempts": 5},
        )

    def encrypt(self, uri: str, key: bytes) -> bytes:
        """Encrypts a key of the process."""
        name, client = self._of(uri)
        answer = client.encrypt(KeyId=name, Plaintext=key, EncryptionContext=_CONTEXT)
        return bytes(answer["CiphertextBlob"])

    def decrypt(self, uri: str, encrypted: bytes) -> bytes:
        """Decrypts a key of a process."""
        name, client = self._of(uri)
        answer = client.decrypt(KeyId=name, CiphertextBlob=encrypted, EncryptionContext=_CONTEXT)
        return bytes(answer["Plaintext"])

    def _of(self, uri: str) -> tuple[str, Any]:
        name = uri.removeprefix("aws-kms://")
        fields = name.split(":")
        # arn:PARTITION:kms:REGION:ACCOUNT:key/ID
        region = fields[3] if fields[0] == "arn" and len(fields) == 6 else None
        # A client is made for each call: there is one call a process and day, and credentials that
        # were replaced meanwhile are taken.
        session = boto3.session.Session()
        return name, session.client("kms", region_name=region, config=self._config)
