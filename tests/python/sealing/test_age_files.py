"""A wrap for an X25519 or ssh key is an age file, which age and a reader of its specification open.

The reader is written from age's specification (C2SP, age.md) on primitives of `cryptography`.
"""

import base64
import hmac
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import penstock
from conftest import REPOSITORY
from penstock import Sealing
from penstock.errors import KeyFileError
from penstock.sealing import Passphrase, generate

pytestmark = pytest.mark.quick

AGE = REPOSITORY / ".cache" / "age-v1.3.1"
"""Where `make objects-server` installs it."""

_BECH32 = "qpzry9x8gf2tvdw0s3jn54khce6mua7l"


def secret_of(path: Path) -> X25519PrivateKey:
    """The key in a file of identities (bech32, without its checksum of six characters)."""
    [line] = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    digits = line.lower().partition("1")[2][:-6]
    number = 0
    for digit in digits:
        number = number << 5 | _BECH32.index(digit)
    surplus = 5 * len(digits) % 8
    return X25519PrivateKey.from_private_bytes((number >> surplus).to_bytes(32, "big"))


def derived(secret: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt, info).derive(secret)


def unpadded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4))


def decrypted(file: bytes, secret: X25519PrivateKey) -> bytes:
    """The content of an age file for one X25519 recipient."""
    end = file.index(b"\n--- ")
    mac, payload = file[end + 5 :].split(b"\n", 1)
    version, stanza, body = file[:end].decode().split("\n")[:3]
    kind, share = stanza.split(" ")[1:]
    assert (version, kind) == ("age-encryption.org/v1", "X25519")
    public = secret.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    share = unpadded(share)
    shared = secret.exchange(X25519PublicKey.from_public_bytes(share))
    wrapping = derived(shared, share + public, b"age-encryption.org/v1/X25519")
    file_key = ChaCha20Poly1305(wrapping).decrypt(bytes(12), unpadded(body), None)
    header_key = derived(file_key, b"", b"header")
    header = file[: end + len(b"\n---")]
    assert hmac.digest(header_key, header, "sha256") == unpadded(mac.decode())
    payload_key = derived(file_key, payload[:16], b"payload")
    return ChaCha20Poly1305(payload_key).decrypt(bytes(11) + b"\1", payload[16:], None)


def test_a_reader_of_the_specification_recovers_the_data_key(tmp_path):
    recipient = generate(tmp_path / "keys.txt")
    key_file = bytes(range(32))
    sealing = Sealing([recipient, lambda: key_file.hex()])
    age, symmetric = json.loads(sealing.wrap_new().wraps())
    assert (age["kind"], age["recipient"]) == ("age", recipient)
    file = base64.b64decode(age["key"])
    key = decrypted(file, secret_of(tmp_path / "keys.txt"))
    # AES key wrap, by another library as well.
    assert key == aes_key_unwrap(key_file, base64.b64decode(symmetric["key"]))


def test_a_key_of_age_keygen_opens(tmp_path):
    """The file that `age-keygen` writes, with the key of its documentation."""
    (tmp_path / "keys.txt").write_text(
        "# created: 2021-01-02T15:30:45+01:00\n"
        "# public key: age1lvyvwawkr0mcnnnncaghunadrqkmuf9e6507x9y920xxpp866cnql7dp2z\n"
        "AGE-SECRET-KEY-1N9JEPW6DWJ0ZQUDX63F5A03GX8QUW7PXDE39N8UYF82VZ9PC8UFS3M7XA9\n"
    )
    [recipient] = Sealing([tmp_path / "keys.txt"]).recipients
    assert recipient == "age1lvyvwawkr0mcnnnncaghunadrqkmuf9e6507x9y920xxpp866cnql7dp2z"


@pytest.fixture
def run():
    """Runs a program of age, and returns its output."""
    if not (AGE / "age-keygen").exists():
        pytest.skip("age is not installed: `make objects-server` does it with Go")

    def run(program, *arguments, given=b""):
        command = [AGE / program, *arguments]
        return subprocess.run(command, input=given, capture_output=True, check=True).stdout

    return run


def ssh_key(path: Path, kind: str) -> Path:
    command = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


def test_age_recovers_the_data_key(tmp_path, run):
    identities = [ssh_key(tmp_path / kind, kind) for kind in ("ed25519", "rsa")]
    recipients = [f"{identity}.pub" for identity in identities]
    generate(tmp_path / "ours")
    run("age-keygen", "-o", tmp_path / "theirs")
    identities += [tmp_path / "ours", tmp_path / "theirs"]
    recipients += identities[2:]
    key_file = bytes(range(32))
    sealing = Sealing([*recipients, lambda: key_file.hex()])
    *wraps, symmetric = json.loads(sealing.wrap_new().wraps())
    assert len(wraps) == 4
    key = aes_key_unwrap(key_file, base64.b64decode(symmetric["key"]))
    for wrap, identity in zip(wraps, identities, strict=True):
        assert run("age", "-d", "-i", identity, given=base64.b64decode(wrap["key"])) == key


def test_age_reads_our_files_of_keys(tmp_path, run):
    recipient = generate(tmp_path / "ours")
    assert run("age-keygen", "-y", tmp_path / "ours").decode().strip() == recipient


def encrypted_by_age(file: Path, secret: str, *, armor: bool) -> Path:
    """Encrypts a file by `age -p`, which asks at a terminal."""
    found = file.with_suffix(".age")
    found.unlink(missing_ok=True)
    command = f"{AGE}/age -p {'-a ' if armor else ''}-o {found} {file}"
    terminal = ["script", "-qec", command, "/dev/null"]
    subprocess.run(
        terminal,
        input=f"{secret}\n{secret}\n".encode(),
        check=True,
        capture_output=True,
        timeout=60,
    )
    return found


@pytest.mark.skipif(not (AGE / "age").exists(), reason="needs age: make objects-server")
@pytest.mark.skipif(shutil.which("script") is None, reason="needs script, for a terminal")
@pytest.mark.parametrize("armor", [False, True])
def test_a_file_of_identities_that_age_has_encrypted_opens_by_a_passphrase(tmp_path, armor):
    recipient = generate(tmp_path / "keys.txt")
    path = tmp_path / "ckpt"
    penstock.save(path, {"w": np.ones(3)}, sealing=Sealing([recipient]))
    file = encrypted_by_age(tmp_path / "keys.txt", "correct horse", armor=armor)
    right, wrong = Passphrase(lambda: "correct horse"), Passphrase(lambda: "wrong")
    if armor:
        # Each attempt takes 256 MiB of memory, as age asks for, and most of a second.
        assert penstock.load(path, identities=[right, file])["w"].sum() == 3
        return
    assert penstock.load(path, identities=[wrong, right, lambda: file.read_bytes()])["w"].sum() == 3
    for identities, said in (
        ([file], "give that before the file"),
        ([file, right], "give that before the file"),
        ([wrong, file], "no passphrase that stands before it"),
    ):
        with pytest.raises(KeyFileError, match=said):
            penstock.load(path, identities=identities)
