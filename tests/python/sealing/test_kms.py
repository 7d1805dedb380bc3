"""Key management services: AWS by moto, Vault by a server of its protocol, others by clients."""

import base64
import http.server
import importlib
import json
import secrets
import sys
import threading
import traceback
import types

import boto3
import moto
import pytest

from penstock import Sealing
from penstock.errors import KmsError, MissingDependencyError, WrongKeyError
from penstock.sealing import Identities, register_kms
from penstock.sealing.kms import CLIENTS

pytestmark = pytest.mark.quick


class Service:
    """A service in this process, which counts its calls, and fails if it is down."""

    def __init__(self):
        self.keys, self.calls, self.is_down = {}, 0, False

    def _call(self):
        self.calls += 1
        if self.is_down:
            raise ConnectionError("the service is down")

    def encrypt(self, uri, key):
        self._call()
        blob = secrets.token_bytes(100)
        self.keys[uri, blob] = key
        return blob

    def decrypt(self, uri, encrypted):
        self._call()
        return self.keys[uri, encrypted]


@pytest.fixture
def service():
    made = Service()
    scheme = f"test-{secrets.token_hex(4)}"
    register_kms(scheme, made)
    made.uri = f"{scheme}://team/key"
    yield made
    del CLIENTS.clients[scheme]


def are_equal(one, other):
    key_file = Sealing(lambda: "00" * 32)
    return key_file.wrap(one) == key_file.wrap(other)


def test_a_process_calls_the_service_once(service):
    keys = [Sealing([service.uri]).wrap_new() for _ in range(50)]
    assert service.calls == 1
    opened = [Identities([service.uri]).native.open(key.wraps()) for key in keys]
    assert all(are_equal(*pair) for pair in zip(keys, opened, strict=True))
    # It has the key that it encrypted.
    assert service.calls == 1


def test_threads_share_the_call(service):
    sealing = Sealing([service.uri])
    threads = [threading.Thread(target=sealing.wrap_new) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert service.calls == 1


def test_saves_continue_while_the_service_is_down(service):
    sealing = Sealing([service.uri])
    sealing.wrap_new()
    service.is_down = True
    key = sealing.wrap_new()
    assert are_equal(key, Identities([service.uri]).native.open(key.wraps()))


def test_a_service_that_is_down_is_named(service):
    service.is_down = True
    with pytest.raises(KmsError, match="the service is down") as caught:
        Sealing([service.uri]).wrap_new()
    assert caught.value.uri == service.uri
    assert isinstance(caught.value.__cause__, ConnectionError)
    service.is_down = False
    Sealing([service.uri]).wrap_new()


def test_no_frame_of_an_error_has_a_key(service, monkeypatch):
    seen = []

    def fails(_uri, key):
        seen.append(key)
        try:
            raise ValueError("inner")
        except ValueError:
            raise ConnectionError("outer")  # noqa: B904  a chain by context

    monkeypatch.setattr(service, "encrypt", fails)
    with pytest.raises(KmsError) as caught:
        Sealing([service.uri]).wrap_new()
    shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True)
    text = "".join(shown.format())
    # The test's own frame holds the list of seen keys, so its variable is left out.
    lines = [line for line in text.splitlines() if not line.strip().startswith("seen =")]
    assert len(seen) == 1
    assert "outer" in text
    assert repr(seen[0])[2:-1] not in "\n".join(lines)


@pytest.mark.parametrize("answer", [b"", bytes(9000), "text", None])
def test_an_answer_that_is_no_key_is_refused(answer, service, monkeypatch):
    monkeypatch.setattr(service, "encrypt", lambda uri, key: answer)
    with pytest.raises(KmsError):
        Sealing([service.uri]).wrap_new()


def test_a_key_of_another_length_is_refused(service, tmp_path, monkeypatch):
    """As after a restore of the service from an old copy."""
    [wrap] = json.loads(Sealing([service.uri]).wrap_new().wraps())
    for uri in (f"{service.uri}-2", service.uri):
        monkeypatch.setattr(service, "decrypt", lambda uri, encrypted: b"short")
        blob = base64.b64decode(wrap["key"])
        changed = base64.b64encode(blob[:2] + bytes(100) + blob[-40:]).decode()
        with pytest.raises(WrongKeyError):
            Identities([uri]).native.open(json.dumps([wrap | {"recipient": uri, "key": changed}]))


def test_identities_limit_whom_a_manifest_can_name(service):
    wraps = Sealing([service.uri]).wrap_new().wraps().replace("team", "evil")
    with pytest.raises(WrongKeyError):
        Identities([service.uri, "aws-kms://"]).native.open(wraps)
    assert service.calls == 1


def test_unknown_schemes_and_missing_clients_are_named(monkeypatch):
    with pytest.raises(KmsError, match=r"no client for this scheme; use one of aws-kms, gcp-kms"):
        Sealing(["no-kms://key"]).wrap_new()
    with pytest.raises(ValueError, match="this URI names no key"):
        Sealing(["aws-kms://"])
    with pytest.raises(ValueError, match="this URI names no host"):
        Identities(["hcvault://"])
    with pytest.raises(ValueError, match="must be letters"):
        register_kms("a b", None)
    monkeypatch.setitem(sys.modules, "google.cloud.kms_v1", None)
    monkeypatch.delitem(sys.modules, "penstock.sealing.kms.gcp", raising=False)
    with pytest.raises(MissingDependencyError, match="pip install google-cloud-kms") as caught:
        Sealing(["gcp-kms://projects/p/locations/l/keyRings/r/cryptoKeys/k"]).wrap_new()
    assert caught.value.name == "google-cloud-kms"


@pytest.fixture
def aws(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with moto.mock_aws():
        yield boto3.client("kms", region_name="eu-west-1")


def test_aws(aws):
    arn = aws.create_key()["KeyMetadata"]["Arn"]
    assert ":eu-west-1:" in arn
    key = Sealing([f"aws-kms://{arn}"]).wrap_new()
    assert are_equal(key, Identities(["aws-kms://"]).native.open(key.wraps()))
    [wrap] = json.loads(key.wraps())
    blob = base64.b64decode(wrap["key"])
    encrypted = blob[2 : 2 + int.from_bytes(blob[:2], "big")]
    # The service knows the context, and the process key opens the wrap.
    kek = aws.decrypt(CiphertextBlob=encrypted, EncryptionContext={"application": "penstock"})
    assert len(kek["Plaintext"]) == 32
    client = importlib.import_module("penstock.sealing.kms.aws").Client()
    assert client.decrypt(f"aws-kms://{arn}", encrypted) == kek["Plaintext"]


def test_aws_names_a_key_that_is_not_there(aws):
    uri = "aws-kms://arn:aws:kms:eu-west-1:123456789012:key/1234"
    with pytest.raises(KmsError, match="NotFoundException") as caught:
        Sealing([uri]).wrap_new()
    assert caught.value.uri == uri


def test_aws_without_credentials(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(KmsError, match="Unable to locate credentials; check the URI"):
        Sealing(["aws-kms://arn:aws:kms:eu-west-1:123456789012:key/5678"]).wrap_new()


class _Transit(http.server.BaseHTTPRequestHandler):
    """Vault's transit engine, mounted at `transit`, with one key, `team`."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.tokens.append(self.headers.get("X-Vault-Token"))
        answers = {
            "/v1/transit/encrypt/team": ("ciphertext", "vault:v1:" + body.get("plaintext", "")),
            "/v1/transit/decrypt/team": ("plaintext", body.get("ciphertext", "")[9:]),
        }
        if self.headers.get("X-Vault-Token") != "t0ken" or self.path not in answers:
            return self._answer(403, {"errors": ["permission denied"]})
        return self._answer(200, {"data": dict([answers[self.path]])})

    do_PUT = do_POST  # noqa: N815  the name that http.server calls

    def _answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def vault(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Transit) as server:
        server.tokens = []
        server.host = f"127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("VAULT_ADDR", f"http://{server.host}")
        monkeypatch.setenv("VAULT_TOKEN", "t0ken")
        yield server
        server.shutdown()
        thread.join()


def test_vault(vault):
    uri = f"hcvault://{vault.host}/transit/keys/team"
    key = Sealing([uri]).wrap_new()
    assert are_equal(key, Identities([f"hcvault://{vault.host}/"]).native.open(key.wraps()))
    client = importlib.import_module("penstock.sealing.kms.vault").Client()
    assert client.decrypt(uri, client.encrypt(uri, b"k" * 32)) == b"k" * 32
    assert set(vault.tokens) == {"t0ken"}


def test_vault_refuses(vault, monkeypatch):
    monkeypatch.setenv("VAULT_TOKEN", "other")
    with pytest.raises(KmsError, match="permission denied") as caught:
        Sealing([f"hcvault://{vault.host}/transit/keys/team"]).wrap_new()
    assert "other" not in str(caught.value)
    with pytest.raises(KmsError, match="HOST:PORT/MOUNT/keys/NAME"):
        Sealing([f"hcvault://{vault.host}/team"]).wrap_new()


@pytest.mark.parametrize(
    "path",
    ["sys/seal/keys/..", "a/../../sys/keys/b", "sys/keys/a", "a/%2e%2e/keys/b", "a//b/keys/c"],
)
def test_a_manifest_cannot_send_the_token_elsewhere(path, vault):
    client = importlib.import_module("penstock.sealing.kms.vault").Client()
    with pytest.raises(ValueError, match="HOST:PORT/MOUNT/keys/NAME"):
        client.decrypt(f"hcvault://{vault.host}/{path}", b"vault:v1:")
    assert vault.tokens == []


def test_vault_is_asked_in_clear_for_one_host_alone(vault, monkeypatch):
    monkeypatch.setenv("VAULT_ADDR", "http://127.0.0.1:1")
    with pytest.raises(KmsError):
        Sealing([f"hcvault://{vault.host}/transit/keys/team"]).wrap_new()
    assert vault.tokens == []


def test_google(monkeypatch):
    """By the calls of the client's interface, as no server of Cloud KMS runs here."""
    name = "projects/p/locations/l/keyRings/r/cryptoKeys/k"

    class KeyManagementServiceClient:
        def encrypt(self, *, request, timeout):
            assert request["name"] == name
            assert request["additional_authenticated_data"] == b"penstock"
            return types.SimpleNamespace(ciphertext=request["plaintext"][::-1])

        def decrypt(self, *, request, timeout):
            assert request["name"] == name
            return types.SimpleNamespace(plaintext=request["ciphertext"][::-1])

    module = types.ModuleType("google.cloud.kms_v1")
    module.KeyManagementServiceClient = KeyManagementServiceClient
    cloud = types.ModuleType("google.cloud")
    cloud.kms_v1 = module
    monkeypatch.setitem(sys.modules, "google.cloud", cloud)
    monkeypatch.setitem(sys.modules, "google.cloud.kms_v1", module)
    monkeypatch.delitem(sys.modules, "penstock.sealing.kms.gcp", raising=False)
    monkeypatch.delitem(CLIENTS.clients, "gcp-kms", raising=False)
    uri = f"gcp-kms://{name}"
    try:
        key = Sealing([uri]).wrap_new()
        assert are_equal(key, Identities([uri]).native.open(key.wraps()))
        client = CLIENTS.clients["gcp-kms"]
        assert client.decrypt(uri, client.encrypt(uri, b"k" * 32)) == b"k" * 32
    finally:
        CLIENTS.clients.pop("gcp-kms", None)
        sys.modules.pop("penstock.sealing.kms.gcp", None)
