//! Azurite, the emulator of Azure Blob Storage, found by `PENSTOCK_AZURITE` (its `main.js` for
//! blobs), or where `make objects-server` installs it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use http::{Method, Request};
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use penstock_object::{Address, Credentials, Keys, Objects, Remote};

use super::server::started;
use super::{BUCKET, PART_BYTES, skip};

pub(crate) const ACCOUNT: &str = "penstock";
/// The account's key: "secret" in base64.
pub(crate) const KEY: &str = "c2VjcmV0";

/// A server with one container.
pub(crate) struct Azurite {
    process: Child,
    pub(crate) address: String,
}

impl Azurite {
    /// Starts a server; prints why and returns `None` if Azurite is not installed.
    pub(crate) fn start(test: &str) -> Option<Azurite> {
        let Some(program) = program() else {
            skip(
                test,
                "Azurite is not installed: `make objects-server` does it with npm",
            );
            return None;
        };
        let (process, address) = started(|address| {
            let (host, port) = address.rsplit_once(':').unwrap();
            let mut command = Command::new("node");
            command
                .arg(&program)
                .args(["--inMemoryPersistence", "--skipApiVersionCheck", "--silent"])
                .args(["--disableTelemetry", "--blobHost", host, "--blobPort", port])
                .env("AZURITE_ACCOUNTS", format!("{ACCOUNT}:{KEY}"));
            command
        });
        let server = Azurite { process, address };
        server.create_container();
        Some(server)
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}/{ACCOUNT}", self.address)
    }

    /// Its container, as a file system.
    pub(crate) fn objects(&self, remote: Remote) -> Objects {
        let remote = Remote {
            endpoint: remote.endpoint.or_else(|| Some(self.endpoint())),
            credentials: remote.credentials.or_else(|| Some(key(KEY))),
            part_bytes: remote.part_bytes.or(Some(PART_BYTES)),
            ..remote
        };
        let address = Address::of(&at("")).unwrap().unwrap();
        Objects::open(address, &remote).unwrap()
    }

    fn create_container(&self) {
        let uri = format!("{}/{BUCKET}?restype=container", self.endpoint());
        let request = Request::builder().method(Method::PUT).uri(uri);
        let mut request: HttpRequest = request.body(HttpRequestBody::empty()).unwrap();
        let key = AzureCredential::AccessKey(AzureAccessKey::try_new(KEY).unwrap());
        let authorizer = AzureAuthorizer::new(&key, ACCOUNT);
        authorizer.try_authorize(&mut request).unwrap();
        let target = request.uri().path_and_query().unwrap();
        let mut text = format!("PUT {target} HTTP/1.1\r\nHost: {}\r\n", self.address);
        for (name, value) in request.headers() {
            text += &format!("{name}: {}\r\n", value.to_str().unwrap());
        }
        text += "Content-Length: 0\r\nConnection: close\r\n\r\n";
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(text.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
    }
}

impl Drop for Azurite {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Credentials of the account with this key.
pub(crate) fn key(secret: &str) -> Credentials {
    Credentials::Given(Keys {
        id: ACCOUNT.to_owned(),
        secret: secret.to_owned(),
        token: None,
        expires: None,
    })
}

pub(crate) fn at(key: &str) -> PathBuf {
    PathBuf::from(format!("az://{BUCKET}/{key}"))
}

fn program() -> Option<PathBuf> {
    let installed = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../.cache/azurite-3.37.0/node_modules/azurite/dist/src/blob/main.js");
    let named = std::env::var_os("PENSTOCK_AZURITE").map(PathBuf::from);
    named.or_else(|| installed.exists().then_some(installed))
}
