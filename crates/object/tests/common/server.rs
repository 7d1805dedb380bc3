//! VersityGW, found by `PENSTOCK_VERSITYGW`, or where `make objects-server` installs it.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::{BUCKET, skip};

/// A server with one bucket, whose objects are files of a directory.
pub(crate) struct Server {
    process: Child,
    pub(crate) address: String,
    root: tempfile::TempDir,
}

impl Server {
    /// Starts a server; prints why and returns `None` if VersityGW is not installed.
    pub(crate) fn start(test: &str) -> Option<Server> {
        let Some(program) = program() else {
            skip(
                test,
                "VersityGW is not installed: `make objects-server` does it with Go",
            );
            return None;
        };
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join(BUCKET)).unwrap();
        let (process, address) = started(|address| {
            let mut command = Command::new(&program);
            command
                .args(["--port", address, "posix"])
                .arg(root.path())
                .env("ROOT_ACCESS_KEY_ID", "key")
                .env("ROOT_SECRET_ACCESS_KEY", "secret");
            command
        });
        Some(Server {
            process,
            address,
            root,
        })
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The server's file of an object.
    pub(crate) fn file(&self, key: &str) -> PathBuf {
        self.root.path().join(BUCKET).join(key)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a server at a free address and waits until it answers.
pub(crate) fn started(command: impl Fn(&str) -> Command) -> (Child, String) {
    // Another process may take the port meanwhile.
    for _ in 0..5 {
        let address = format!("127.0.0.1:{}", free_port());
        let mut process = command(&address)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(60) {
            if process.try_wait().unwrap().is_some() {
                break;
            }
            if TcpStream::connect(&address).is_ok() {
                return (process, address);
            }
            thread::sleep(Duration::from_millis(20));
        }
        let _ = process.kill();
        let _ = process.wait();
    }
    panic!("{:?} does not start", command("").get_program());
}

fn program() -> Option<PathBuf> {
    let installed =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/versitygw-v1.8.0/versitygw");
    let named = std::env::var_os("PENSTOCK_VERSITYGW").map(PathBuf::from);
    named.or_else(|| installed.exists().then_some(installed))
}

pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}
