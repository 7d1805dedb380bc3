//! Requests that this crate composes itself, and their responses.

use std::time::Duration;

use bytes::Bytes;
use http::Method;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use object_store::path::Path as Key;

/// How long a response may take that needs no work of the store.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Slowest transfer rate in bytes a second before a connection counts as broken. The system
/// notices a dead peer after 30 seconds (`TCP_USER_TIMEOUT`).
const BYTES_PER_SECOND_MIN: u64 = 64 << 10;

/// One request, which may be sent several times.
#[derive(Clone, Debug)]
pub(crate) struct Ask<'a> {
    pub(crate) method: Method,
    pub(crate) key: &'a Key,
    pub(crate) query: Vec<(&'static str, String)>,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    time_max: Duration,
}

impl<'a> Ask<'a> {
    pub(crate) fn new(method: Method, key: &'a Key) -> Ask<'a> {
        Ask {
            method,
            key,
            query: Vec::new(),
            headers: HeaderMap::new(),
            body: Bytes::new(),
            time_max: ANSWER_MAX,
        }
    }

    pub(crate) fn query(mut self, name: &'static str, value: impl Into<String>) -> Ask<'a> {
        self.query.push((name, value.into()));
        self
    }

    pub(crate) fn header(mut self, name: HeaderName, value: HeaderValue) -> Ask<'a> {
        self.headers.insert(name, value);
        self
    }

    /// Sets the body and extends the time limit by what a slow connection needs to send it.
    pub(crate) fn body(mut self, body: Bytes) -> Ask<'a> {
        self.time_max += Duration::from_secs(body.len() as u64 / BYTES_PER_SECOND_MIN);
        self.body = body;
        self
    }

    pub(crate) fn body_bytes(&self) -> u64 {
        self.body.len() as u64
    }

    /// Time limit of the whole request.
    pub(crate) fn time_max(&self) -> Duration {
        self.time_max
    }

    /// Extends the time limit by the time that the store works on the request.
    pub(crate) fn work(mut self, time: Duration) -> Ask<'a> {
        self.time_max += time;
        self
    }
}

/// A successful response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn header(&self, name: &HeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}
