//! A proxy between a client and a server that records requests, and may change, cut or slow
//! down the bytes that pass.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// The decision about bytes that pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Pass,
    /// Drop them and close the connection.
    Cut,
}

/// Sees and may change the bytes to the server (`true`) or from it.
pub(crate) type Hook = dyn FnMut(bool, &mut [u8]) -> Fate + Send;

/// The speed of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// Bytes a second to the server and from it; unlimited if 0.
    pub(crate) up: u64,
    pub(crate) down: u64,
    /// Delay before the first byte of each response.
    pub(crate) latency: Duration,
}

struct ProxyShared {
    server: String,
    pace: Pace,
    hook: Mutex<Box<Hook>>,
    heads: Mutex<Vec<String>>,
}

/// A proxy that runs as long as the test.
pub(crate) struct Proxy {
    address: String,
    shared: Arc<ProxyShared>,
}

impl Proxy {
    pub(crate) fn start(
        server: &str,
        pace: Pace,
        hook: impl FnMut(bool, &mut [u8]) -> Fate + Send + 'static,
    ) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(ProxyShared {
            server: server.to_owned(),
            pace,
            hook: Mutex::new(Box::new(hook)),
            heads: Mutex::default(),
        });
        let ours = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming() {
                let (client, shared) = (client.unwrap(), Arc::clone(&ours));
                let Ok(server) = TcpStream::connect(&shared.server) else {
                    continue;
                };
                client.set_nodelay(true).unwrap();
                server.set_nodelay(true).unwrap();
                let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
                let there = Arc::clone(&shared);
                thread::spawn(move || there.forward(true, from, to));
                thread::spawn(move || shared.forward(false, server, client));
            }
        });
        Proxy { address, shared }
    }

    /// A proxy that only records.
    pub(crate) fn watch(server: &str) -> Proxy {
        Proxy::start(server, Pace::default(), |_, _| Fate::Pass)
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The heads of all requests since the last call, without their signatures.
    pub(crate) fn take_heads(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.heads.lock().unwrap())
    }
}

impl ProxyShared {
    fn forward(&self, is_up: bool, mut from: TcpStream, mut to: TcpStream) {
        let mut buf = vec![0; 64 << 10];
        let pace = if is_up { self.pace.up } else { self.pace.down };
        let mut is_free_at = Instant::now();
        while let Ok(len @ 1..) = from.read(&mut buf) {
            let bytes = &mut buf[..len];
            if is_up {
                self.note(bytes);
            } else if bytes.starts_with(b"HTTP/1.1 ") {
                thread::sleep(self.pace.latency);
            }
            if self.hook.lock().unwrap()(is_up, bytes) == Fate::Cut {
                break;
            }
            if pace > 0 {
                let now = Instant::now();
                thread::sleep(is_free_at.saturating_duration_since(now));
                let takes = Duration::from_secs_f64(len as f64 / pace as f64);
                is_free_at = is_free_at.max(now) + takes;
            }
            if to.write_all(bytes).is_err() {
                break;
            }
        }
        let _ = from.shutdown(Shutdown::Both);
        let _ = to.shutdown(Shutdown::Both);
    }

    /// Records the head of a request, which the client sends at once.
    fn note(&self, bytes: &[u8]) {
        const VERSION: &[u8] = b" HTTP/1.1\r\n";
        if !bytes.windows(VERSION.len()).any(|window| window == VERSION) {
            return;
        }
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
        let head = String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]);
        let unsigned = |line: &str| match line.split_once("X-Amz-Algorithm") {
            Some((before, _)) => before.trim_end_matches(['?', '&']).to_owned(),
            None => line.to_owned(),
        };
        let lines: Vec<String> = head.lines().map(unsigned).collect();
        self.heads.lock().unwrap().push(lines.join("\n"));
    }
}
