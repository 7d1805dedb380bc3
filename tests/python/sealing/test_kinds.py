"""Each kind of key opens what was sealed for it, and nothing else does."""

import json
import subprocess
from pathlib import Path

import pytest

from penstock import Sealing
from penstock.errors import KeyFileError, WrongKeyError
from penstock.sealing import Identities, Passphrase, generate, register_kms

pytestmark = pytest.mark.quick


class Inverted:
    """A key management service that inverts bits."""

    def encrypt(self, uri, key):
        return bytes(255 - byte for byte in key)

    decrypt = encrypt


register_kms("inverted-kms", Inverted())


def ssh_key(path: Path, kind: str, passphrase: str = "") -> Path:
    command = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "me@here", "-f", str(path)]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Recipients and identities of each kind."""
    home = tmp_path_factory.mktemp("keys")
    recipient = generate(home / "x25519")
    generate(home / "key", kind="key-file")
    (home / "digits").write_text("0123456789abcdef" * 4 + "\n")
    (home / "passphrase").write_text("correct horse\n")
    for kind in ("ed25519", "rsa"):
        ssh_key(home / kind, kind)
    return {
        "x25519": (recipient, home / "x25519"),
        "x25519 of an identity file": (home / "x25519", str(home / "x25519")),
        "key file": (home / "key", home / "key"),
        "key file of digits": (home / "digits", str(home / "digits")),
        "passphrase of a file": (
            f"passphrase-file:{home}/passphrase",
            Passphrase(lambda: b"correct horse"),
        ),
        "passphrase": (Passphrase(lambda: "abc"), Passphrase(lambda: "abc\n")),
        "ssh-ed25519": ((home / "ed25519.pub").read_text(), home / "ed25519"),
        "ssh-rsa": (home / "rsa.pub", (home / "rsa").read_text()),
        "KMS": ("inverted-kms://team/key", "inverted-kms://team/"),
    }


def are_equal(one, other) -> bool:
    """Whether two data keys are the same, by a wrap without randomness."""
    key_file = Sealing(lambda: "00" * 32)
    return key_file.wrap(one) == key_file.wrap(other)


KINDS = (
    "x25519",
    "x25519 of an identity file",
    "key file",
    "key file of digits",
    "passphrase of a file",
    "passphrase",
    "ssh-ed25519",
    "ssh-rsa",
    "KMS",
)


@pytest.mark.parametrize("kind", KINDS)
def test_an_identity_opens_what_was_sealed_for_it(kind, pairs):
    recipient, identity = pairs[kind]
    sealing = Sealing([recipient])
    key = sealing.wrap_new()
    opened = Identities([identity]).native.open(key.wraps())
    assert are_equal(key, opened)
    assert not are_equal(key, sealing.wrap_new())


@pytest.mark.parametrize("kind", KINDS)
def test_each_of_many_recipients_opens(kind, pairs):
    sealing = Sealing([recipient for recipient, _ in pairs.values()])
    # An identity file stands for the recipient of its key, which is not wrapped for twice.
    assert len(sealing.recipients) == len(pairs) - 1
    key = sealing.wrap_new()
    assert are_equal(key, Identities([pairs[kind][1]]).native.open(key.wraps()))


@pytest.mark.parametrize("kind", KINDS)
def test_identities_of_others_do_not_open(kind, pairs):
    family = {kind, "x25519", "x25519 of an identity file"} if "x25519" in kind else {kind}
    others = [identity for name, (_, identity) in pairs.items() if name not in family]
    key = Sealing([pairs[kind][0]]).wrap_new()
    with pytest.raises(WrongKeyError):
        Identities(others).native.open(key.wraps())


def test_the_error_names_recipients(pairs, tmp_path):
    recipient = pairs["x25519"][0]
    generate(tmp_path / "other")
    key = Sealing([recipient, pairs["key file"][0]]).wrap_new()
    with pytest.raises(WrongKeyError, match=rf"\(1\).*{recipient}, penstock-key:"):
        Identities([tmp_path / "other"]).native.open(key.wraps())


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_and_cut_wraps_do_not_open(kind, pairs):
    recipient, identity = pairs[kind]
    identities = Identities([identity])
    [wrap] = json.loads(Sealing([recipient]).wrap_new().wraps())
    text = wrap["key"]
    # A passphrase derives no key twice, and the others take microseconds.
    for index in range(0, len(text.rstrip("=")) - 1, 7):
        flipped = text[:index] + ("B" if text[index] != "B" else "C") + text[index + 1 :]
        with pytest.raises(WrongKeyError):
            identities.native.open(json.dumps([wrap | {"key": flipped}]))
    for length in range(0, len(text), 4):
        with pytest.raises(WrongKeyError):
            identities.native.open(json.dumps([wrap | {"key": text[:length]}]))


def test_the_first_identity_that_fits_opens(pairs):
    identities = Identities([identity for _, identity in pairs.values()])
    for recipient, _ in pairs.values():
        key = Sealing([recipient]).wrap_new()
        assert are_equal(key, identities.native.open(key.wraps()))


def test_ssh_keys_with_passphrases(tmp_path):
    path = ssh_key(tmp_path / "key", "ed25519", "sesame")
    key = Sealing([tmp_path / "key.pub"]).wrap_new()
    with pytest.raises(KeyFileError, match="the ssh key has a passphrase"):
        Identities([path])
    with pytest.raises(KeyFileError, match="the ssh key has a passphrase"):
        Identities([Passphrase(lambda: "wrong"), path])
    identities = Identities([Passphrase(lambda: "wrong"), Passphrase(lambda: "sesame"), path])
    assert are_equal(key, identities.native.open(key.wraps()))


def test_ssh_keys_that_cannot_encrypt(tmp_path):
    ssh_key(tmp_path / "key", "ecdsa")
    with pytest.raises(KeyFileError, match="use ssh-ed25519 or ssh-rsa"):
        Sealing([tmp_path / "key.pub"])
    with pytest.raises(KeyFileError, match="use ssh-ed25519 or ssh-rsa"):
        Identities([tmp_path / "key"])


def test_ranks_send_the_key_wrapped():
    from penstock import _native

    key = Sealing(lambda: "00" * 32).wrap_new()
    rank, other = _native.EphemeralKey(), _native.EphemeralKey()
    wrap = key.wrap_for(rank.recipient)
    assert are_equal(key, rank.open(wrap, key.wraps()))
    assert rank.open(wrap, key.wraps()).wraps() == key.wraps()
    with pytest.raises(WrongKeyError):
        other.open(wrap, key.wraps())
    assert repr(rank) == "EphemeralKey(..)"
    assert repr(key) == "AttemptKey(..)"
