"""HashiCorp Vault: ``hcvault://HOST:PORT/MOUNT/keys/NAME``, a key of its transit engine.

The token is that of ``VAULT_TOKEN`` or ``~/.vault-token``, the namespace that of
``VAULT_NAMESPACE``, certificates those of ``VAULT_CACERT``. The connection is encrypted unless
``VAULT_ADDR`` is ``http://HOST:PORT`` with the same host and port, as for a development server.
"""

from __future__ import annotations

import base64
import os
import re
from typing import Any

import hvac

_TIMEOUT_SECONDS = 30


class Client:
    """Keys of Vault's transit engine."""

    def encrypt(self, uri: str, key: bytes) -> bytes:
        """Encrypts a key of the process."""
        transit, mount, name = _of(uri)
        text = base64.b64encode(key).decode()
        answer = transit.encrypt_data(name=name, plaintext=text, mount_point=mount)
        return str(answer["data"]["ciphertext"]).encode()

    def decrypt(self, uri: str, encrypted: bytes) -> bytes:
        """Decrypts a key of a process."""
        transit, mount, name = _of(uri)
        text = encrypted.decode()
        answer = transit.decrypt_data(name=name, ciphertext=text, mount_point=mount)
        return base64.b64decode(answer["data"]["plaintext"])


def _of(uri: str) -> tuple[Any, str, str]:
    # A manifest names the key before it is authenticated: nothing but a mount and a name may reach
    # the request, which carries the token. Vault's own interfaces are no mounts of transit.
    match = re.fullmatch(r"hcvault://([\w.:-]+)/([\w-]+(?:/[\w-]+)*)/keys/(\w[\w.-]*)", uri, re.A)
    if match is None or match[2].partition("/")[0] in ("sys", "auth", "identity", "cubbyhole"):
        raise ValueError("the URI of a Vault key is hcvault://HOST:PORT/MOUNT/keys/NAME")
    host, mount, name = match.groups()
    is_clear = os.environ.get("VAULT_ADDR", "").rstrip("/") == f"http://{host}"
    client = hvac.Client(
        url=f"http{'' if is_clear else 's'}://{host}",
        namespace=os.environ.get("VAULT_NAMESPACE") or None,
        verify=os.environ.get("VAULT_CACERT") or True,
        timeout=_TIMEOUT_SECONDS,
        # A redirect would carry the token to another host.
        allow_redirects=False,
    )
    return client.secrets.transit, mount, name
