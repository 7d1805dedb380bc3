"""Signed checkpoints: who vouches for them.

A signature says which bytes a checkpoint has, and that the holder of a private key has seen them
there. It protects clear and sealed checkpoints alike, and takes no secret to check.

| kind | private key | public key | other tools |
|---|---|---|---|
| ssh | Ed25519 | a ``.pub`` file, ``allowed_signers`` | ``ssh-keygen -Y verify`` |
| OpenSSF | EC P-256 in PEM | PEM | ``model_signing verify key`` |

`penstock.sign` signs a checkpoint that is there. ``signed_by=`` of `penstock.load` and of
`penstock.CheckpointStore` refuses every other one.

A key is the path of its file, or the text of the file: ``-----BEGIN…``, ``ssh-ed25519 AAAA…``. A
callable returns the content of such a file. An ssh key with a passphrase opens if one that fits
stands before it: ``[penstock.sealing.Passphrase(getpass), "key"]``, ``passphrase-env:NAME`` or
``passphrase-file:PATH``.

Example:
    >>> import subprocess, tempfile
    >>> import numpy as np, penstock
    >>> home = tempfile.mkdtemp()
    >>> command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{home}/key"]
    >>> _ = subprocess.run(command, check=True)
    >>> _ = penstock.save(f"{home}/ckpt", {"w": np.ones(3)})
    >>> penstock.sign(f"{home}/ckpt", f"{home}/key").files
    3
    >>> penstock.load(f"{home}/ckpt", signed_by=f"{home}/key.pub")
    {'w': array([1., 1., 1.])}
"""

from penstock.signing.signers import Signers
from penstock.signing.signing_keys import SigningKeys
from penstock.signing.values import SignatureKey

__all__ = ["SignatureKey", "Signers", "SigningKeys"]
