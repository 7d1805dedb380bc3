"""Google Cloud: ``gcp-kms://projects/P/locations/L/keyRings/R/cryptoKeys/K``.

Credentials are Google's application default ones. A process needs the role
``roles/cloudkms.cryptoKeyEncrypter`` to save and ``…Decrypter`` to load.
"""

from __future__ import annotations

from google.cloud import kms_v1

_CONTEXT = b"penstock"
_TIMEOUT_SECONDS = 30.0


class Client:
    """Keys of Cloud KMS."""

    def encrypt(self, uri: str, key: bytes) -> bytes:
        """Encrypts a key of the process."""
        request = {
            "name": uri.removeprefix("gcp-kms://"),
            "plaintext": key,
            "additional_authenticated_data": _CONTEXT,
        }
        client = kms_v1.KeyManagementServiceClient()
        return bytes(client.encrypt(request=request, timeout=_TIMEOUT_SECONDS).ciphertext)

    def decrypt(self, uri: str, encrypted: bytes) -> bytes:
        """Decrypts a key of a process."""
        request = {
            "name": uri.removeprefix("gcp-kms://"),
            "ciphertext": encrypted,
            "additional_authenticated_data": _CONTEXT,
        }
        client = kms_v1.KeyManagementServiceClient()
        return bytes(client.decrypt(request=request, timeout=_TIMEOUT_SECONDS).plaintext)
