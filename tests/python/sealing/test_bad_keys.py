"""Wrong keys are refused when they are given, with their place and without their text."""

import copy
import os
import pickle
import traceback
from pathlib import Path

import pytest

from penstock import Sealing
from penstock.errors import KeyFileError, PenstockError, StorageError, WrongKeyError
from penstock.sealing import Identities, Passphrase, generate

pytestmark = pytest.mark.quick

SECRET = "AGE-SECRET-KEY-1N9JEPW6DWJ0ZQUDX63F5A03GX8QUW7PXDE39N8UYF82VZ9PC8UFS3M7XA9"
PUBLIC = "age1lvyvwawkr0mcnnnncaghunadrqkmuf9e6507x9y920xxpp866cnql7dp2z"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no key in it"),
        ("# a comment\n\n", "there is no key in it"),
        (f"# mine\n{SECRET[:-1]}\n", r"line 2: no X25519 identity"),
        (f"{SECRET}\n{SECRET[:-1]}Q\n", r"line 2: no X25519 identity"),
        (f"{PUBLIC[:-1]}q", r"line 1: no X25519 recipient"),
        ("age1tag1qwe0kafsjrar4txm6heqnhpfuggzr0gvznz7fvygxrlq90u5mq2pysxtw6h", "plug-ins"),
        ("AGE-PLUGIN-YUBIKEY-1QQQSYQZQZ", "plug-ins"),
        ("0123456789abcdef" * 4 + "0", "this is no key"),
        ("PENSTOCK-SECRET-KEY-1" + "0g" * 32, "this is no key"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n", "incomplete or damaged"),
        ("-----BEGIN AGE ENCRYPTED FILE-----\n", "damaged file of age"),
        ("age-encryption.org/v1\n-> X25519 a\n", "damaged file of age"),
        ("ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA me", "ssh public key"),
        ("x" * (64 << 10) + "x", "larger than 64 KiB"),
        (b"\xff\xfe\x00", "it is no text"),
    ],
)
def test_a_file_is_refused_by_line_and_without_its_text(content, message, tmp_path):
    path = tmp_path / "keys.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(KeyFileError, match=message) as caught:
        Identities([path])
    assert caught.value.path == str(path)
    assert isinstance(caught.value, ValueError)
    _has_no_secret(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(StorageError, match=r"keys\.txt: No such file") as caught:
        Identities([tmp_path / "keys.txt"])
    assert isinstance(caught.value, OSError)
    with pytest.raises(StorageError, match="Is a directory"):
        Identities([tmp_path])
    with pytest.raises(KeyFileError, match=r"identities\[1\]: this is neither a key"):
        Identities([SECRET, str(tmp_path / "keys.txt")])


@pytest.mark.parametrize("text", ["keys.txt", SECRET[1:], SECRET[:-1], "00" * 31, ""])
def test_a_string_is_refused_by_its_index_and_without_its_text(text):
    with pytest.raises(KeyFileError, match=r"^identities\[0\]: ") as caught:
        Identities([text])
    assert caught.value.path is None
    assert not text or text not in str(caught.value)


def test_public_keys_are_no_identities(tmp_path):
    (tmp_path / "recipients.txt").write_text(f"{PUBLIC}\n")
    for identity in (PUBLIC, tmp_path / "recipients.txt"):
        with pytest.raises(KeyFileError, match="a public key opens nothing"):
            Identities([identity])


def test_no_keys_are_refused():
    with pytest.raises(KeyFileError, match="identities: there are none"):
        Identities([])
    with pytest.raises(KeyFileError, match="recipients: there are 0"):
        Sealing([])
    with pytest.raises(KeyFileError, match="recipients: there are 257"):
        Sealing(lambda: "\n".join(f"{index:064x}" for index in range(257)))


def test_types():
    with pytest.raises(TypeError, match=r"recipients: must be a list of keys, not int"):
        Sealing(3)
    with pytest.raises(TypeError, match=r"recipients\[1\]: .* not bytes"):
        Sealing([PUBLIC, SECRET.encode()])
    with pytest.raises(TypeError, match=r"identities\[0\]: its callable returned int"):
        Identities([lambda: 3])
    with pytest.raises(TypeError, match="source: must be callable, not str") as caught:
        Passphrase("sesame")
    assert "sesame" not in str(caught.value)


def test_passphrases_are_not_empty(monkeypatch):
    with pytest.raises(KeyFileError, match=r"recipients\[0\]: the passphrase is empty"):
        Sealing([Passphrase(lambda: "\n")])
    with pytest.raises(KeyFileError, match="the environment variable NO_SUCH is not set"):
        Sealing(["passphrase-env:NO_SUCH"])
    monkeypatch.setenv("SESAME", "correct horse")
    assert Sealing("passphrase-env:SESAME").recipients == ("passphrase",)


def test_a_callable_is_called_once_and_gives_the_content_of_a_file():
    calls = []

    def fetched():
        calls.append(1)
        return f"# of the vault\n{SECRET}\n".encode()

    identities = Identities(fetched)
    for _ in range(3):
        identities.native.open(Sealing([PUBLIC]).wrap_new().wraps())
    assert calls == [1]


def test_an_error_of_a_callable_is_raised_as_it_is():
    def fails():
        raise RuntimeError("the vault is shut")

    with pytest.raises(RuntimeError, match="the vault is shut"):
        Identities([fails])


def test_a_pipe_is_read(tmp_path):
    reader, writer = os.pipe()
    os.write(writer, f"{SECRET}\n".encode())
    os.close(writer)
    try:
        assert Identities([Path(f"/dev/fd/{reader}")]).native.count() == 1
    finally:
        os.close(reader)


def test_the_home_directory_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "keys.txt").write_text(SECRET)
    (tmp_path / "passphrase").write_text("sesame")
    assert Identities(["~/keys.txt", "passphrase-file:~/passphrase"]).native.count() == 2


def test_the_environment_names_a_file(tmp_path, monkeypatch):
    assert Identities.resolve(None) is None
    (tmp_path / "keys.txt").write_text(f"{SECRET}\naws-kms://\n")
    monkeypatch.setenv("PENSTOCK_IDENTITIES", str(tmp_path / "keys.txt"))
    assert repr(Identities.resolve(None)) == "Identities(2 keys)"
    given = Identities([SECRET])
    assert Identities.resolve(given) is given
    assert repr(Identities.resolve([SECRET])) == "Identities(1 key)"
    monkeypatch.setenv("PENSTOCK_IDENTITIES", str(tmp_path / "missing.txt"))
    with pytest.raises(StorageError, match=r"missing\.txt"):
        Identities.resolve(None)


def test_the_environment_may_hold_the_key_itself(monkeypatch):
    monkeypatch.setenv("PENSTOCK_IDENTITIES", SECRET)
    assert Identities.resolve(None).native.count() == 1
    for wrong in (SECRET[:-1], "PENSTOCK-SECRET-KEY-1" + "ab" * 31, "ab" * 33):
        monkeypatch.setenv("PENSTOCK_IDENTITIES", wrong)
        with pytest.raises(KeyFileError) as caught:
            Identities.resolve(None)
        assert wrong[-20:] not in str(caught.value)


def test_secrets_are_shown_nowhere(tmp_path):
    given = [SECRET, Passphrase(lambda: "correct horse battery")]
    for made in (Sealing(given), Identities(given), *given[1:]):
        assert "N9JEPW6" not in repr(made)
        assert "horse" not in repr(made)
    for made in (Sealing(given), Identities(given)):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(made)
        assert copy.deepcopy(made) is made
    generate(tmp_path / "other")
    key = Sealing([tmp_path / "other"]).wrap_new()
    with pytest.raises(WrongKeyError) as caught:
        Identities(given).native.open(key.wraps())
    _has_no_secret(caught.value)


def _has_no_secret(error: PenstockError) -> None:
    text = "".join(traceback.TracebackException.from_exception(error).format())
    assert "N9JEPW6" not in text
    assert "N9JEPW6" not in repr(error.__dict__)


@pytest.mark.parametrize("value", ['"{}"', "KEY={}", "# a comment\n{}", "'{}'\n"])
def test_no_error_shows_the_key_of_the_environment(value, monkeypatch):
    key = "AGE-SECRET-KEY-1GFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPQ4EGAEX"
    monkeypatch.setenv("PENSTOCK_IDENTITIES", value.format(key))
    if value.startswith("#"):
        assert repr(Identities.resolve(None)) == "Identities(1 key)"
        return
    with pytest.raises(KeyFileError) as caught:
        Identities.resolve(None)
    assert key not in str(caught.value)


def test_no_error_shows_a_key_that_was_made_a_path():
    key = "PENSTOCK-SECRET-KEY-1" + "5e" * 32
    for use in (Identities, Sealing):
        with pytest.raises(KeyFileError) as caught:
            use([Path(key)])
        assert "5e5e" not in str(caught.value)
