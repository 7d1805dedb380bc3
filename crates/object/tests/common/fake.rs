//! A store with scripted responses, over a real socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) method: String,
    /// Path and query, with the signature.
    pub(crate) target: String,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Request {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(": ")?;
            found.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    /// Whether it has this method, and these words in its target.
    pub(crate) fn is(&self, method: &str, words: &str) -> bool {
        self.method == method && self.target.contains(words)
    }
}

/// The response to a request.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Bytes of the body that are sent before the connection closes.
    cut: Option<usize>,
    is_lost: bool,
    is_garbled: bool,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Vec<u8>>) -> Reply {
        Reply {
            status,
            headers: Vec::new(),
            body: body.into(),
            cut: None,
            is_lost: false,
            is_garbled: false,
        }
    }

    /// The same with a malformed status line.
    pub(crate) fn garbled(self) -> Reply {
        Reply {
            is_garbled: true,
            ..self
        }
    }

    /// An error response of S3.
    pub(crate) fn request_error(status: u16, code: &str, message: &str) -> Reply {
        let declaration = r#"<?xml version="1.0" encoding="UTF-8"?>"#;
        let error = format!("<Error><Code>{code}</Code><Message>{message}</Message></Error>");
        Reply::new(status, format!("{declaration}\n{error}"))
    }

    /// The connection closes without a response.
    pub(crate) fn lost() -> Reply {
        Reply {
            is_lost: true,
            ..Reply::new(200, "")
        }
    }

    #[expect(
        clippy::needless_pass_by_value,
        reason = "it is a number, or a short text"
    )]
    pub(crate) fn header(mut self, name: &str, value: impl ToString) -> Reply {
        self.headers.push((name.to_owned(), value.to_string()));
        self
    }

    /// The connection closes after so many bytes of the body.
    pub(crate) fn cut(mut self, bytes: usize) -> Reply {
        self.cut = Some(bytes);
        self
    }

    fn send(&self, to: &mut TcpStream, is_head: bool) -> std::io::Result<()> {
        let protocol = if self.is_garbled { "HTUP" } else { "HTTP" };
        let mut head = format!("{protocol}/1.1 {} Status\r\n", self.status);
        if !self
            .headers
            .iter()
            .any(|(name, _)| name == "content-length")
        {
            head.push_str(&format!("content-length: {}\r\n", self.body.len()));
        }
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        to.write_all(head.as_bytes())?;
        to.write_all(b"\r\n")?;
        let bytes = self.cut.unwrap_or(self.body.len());
        to.write_all(if is_head { &[] } else { &self.body[..bytes] })
    }
}

/// Answers requests one after the other.
pub(crate) struct Fake {
    pub(crate) endpoint: String,
    seen: Arc<Mutex<Vec<Request>>>,
}

impl Fake {
    pub(crate) fn start(answer: impl FnMut(&Request) -> Reply + Send + 'static) -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&seen);
        let answer = Arc::new(Mutex::new(answer));
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, answer) = (stream.unwrap(), Arc::clone(&answer));
                let noted = Arc::clone(&noted);
                thread::spawn(move || {
                    let mut from = BufReader::new(stream.try_clone().unwrap());
                    while let Some(request) = read(&mut from) {
                        let reply = answer.lock().unwrap()(&request);
                        let is_head = request.method == "HEAD";
                        noted.lock().unwrap().push(request);
                        let is_over = reply.is_lost || reply.cut.is_some();
                        let is_sent = !reply.is_lost && reply.send(&mut stream, is_head).is_ok();
                        if is_over || !is_sent {
                            return;
                        }
                    }
                });
            }
        });
        Fake { endpoint, seen }
    }

    /// The requests so far.
    pub(crate) fn seen(&self) -> Vec<Request> {
        self.seen.lock().unwrap().clone()
    }

    /// The number of requests of this kind.
    pub(crate) fn count(&self, method: &str, words: &str) -> usize {
        let seen = self.seen();
        seen.iter()
            .filter(|request| request.is(method, words))
            .count()
    }
}

fn read(from: &mut BufReader<TcpStream>) -> Option<Request> {
    let mut head = String::new();
    loop {
        let mut line = String::new();
        if from.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line == "\r\n" {
            break;
        }
        head.push_str(&line);
    }
    let mut words = head.split(' ');
    let mut request = Request {
        method: words.next()?.to_owned(),
        target: words.next()?.to_owned(),
        head: head.clone(),
        body: Vec::new(),
    };
    let bytes = request.header("content-length").map_or(0, |bytes| {
        bytes.trim().parse::<usize>().expect("a number of bytes")
    });
    request.body.resize(bytes, 0);
    from.read_exact(&mut request.body).ok()?;
    Some(request)
}
