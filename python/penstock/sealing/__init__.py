"""Sealed checkpoints: who can open them, and with which keys.

A sealed checkpoint is encrypted and authenticated with a random key of its own, the data key. The
checkpoint holds that key once for each *recipient*, encrypted for it alone. An *identity* is the
secret counterpart of a recipient: it opens the checkpoint.

| kind | recipient | identity |
|---|---|---|
| X25519 | ``age1…`` | a file of `penstock keys generate` or of age-keygen |
| ssh | ``ssh-ed25519 AAAA…``, ``ssh-rsa AAAA…``, a ``.pub`` file | the private key's file |
| key file | a file of `penstock keys generate --kind key-file` | the same file |
| passphrase | ``passphrase-env:NAME``, ``passphrase-file:PATH`` | the same |
| KMS | ``aws-kms://…``, ``gcp-kms://…``, ``hcvault://…`` | the same URI, or its beginning |

Recipients and identities are strings, paths or callables. A string is a key, a URI or the path of a
file; a file has a key a line, with comments after ``#``. A callable returns the content of such a
file, as text or bytes: it fetches a key that is not on disk. A `Passphrase` holds a callable that
returns a passphrase.

`recipients` lists who can open a checkpoint. `add_recipients`, `remove_recipients` and `rotate`
replace its manifest alone, whatever its size.

Example:
    >>> import os, tempfile
    >>> from penstock import Sealing
    >>> from penstock.sealing import Identities, generate
    >>> path = tempfile.mkdtemp() + "/keys.txt"
    >>> recipient = generate(path)
    >>> recipient[:4], oct(os.stat(path).st_mode)[-3:]
    ('age1', '600')
    >>> len(Sealing([recipient]).recipients), Identities([path])
    (1, Identities(1 key))
"""

from penstock.sealing.generation import generate
from penstock.sealing.identities import Identities
from penstock.sealing.kms import KmsClient, register_kms
from penstock.sealing.passphrase import Key, Passphrase
from penstock.sealing.rewrapping import (
    Recipient,
    add_recipients,
    recipients,
    remove_recipients,
    rotate,
)
from penstock.sealing.sealing import Sealing

__all__ = [
    "Identities",
    "Key",
    "KmsClient",
    "Passphrase",
    "Recipient",
    "Sealing",
    "add_recipients",
    "generate",
    "recipients",
    "register_kms",
    "remove_recipients",
    "rotate",
]
