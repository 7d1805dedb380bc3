//! Determines a request's call and key from its request line and headers.

use bytes::Bytes;
use http::Method;
use http::header::AUTHORIZATION;
use http::request::Parts;
use percent_encoding::percent_decode_str;

use crate::fault::Fault;
use crate::token;

/// The protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dialect {
    S3,
    Google,
}

/// The header with the required generation; 0 means that there must be no object.
pub(crate) const IF_GENERATION: &str = "x-goog-if-generation-match";

/// The header with the source of a copy.
pub(crate) const COPY_SOURCE: &str = "x-goog-copy-source";

/// The calls of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Call {
    /// `HeadObject`.
    Head,
    /// `GetObject`.
    Get,
    /// `ListObjectsV2`.
    List,
    /// `ListMultipartUploads`.
    ListUploads,
    /// `ListParts`.
    ListParts,
    /// `PutObject`.
    Put,
    /// `CopyObject`.
    Copy,
    /// `DeleteObject`, or `DeleteObjects`.
    Delete,
    /// `CreateMultipartUpload`.
    BeginUpload,
    /// `UploadPart`.
    PutPart,
    /// `CompleteMultipartUpload`.
    Complete,
    /// `AbortMultipartUpload`.
    Abort,
}

impl Call {
    /// Whether it changes nothing.
    pub fn is_read(self) -> bool {
        matches!(
            self,
            Call::Head | Call::Get | Call::List | Call::ListUploads | Call::ListParts
        )
    }
}

/// A request in the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The client: the id of its key, or the client of its token.
    pub client: String,
    /// Its number among the client's requests, from 0.
    pub nth: usize,
    /// The call.
    pub call: Call,
    /// The key, or the prefix of a listing.
    pub key: String,
    /// Whether it had a condition.
    pub is_conditional: bool,
    /// The request's fault.
    pub fault: Option<Fault>,
    /// How often it was applied.
    pub applied: usize,
    /// The status of the answer; `None` where there was no answer.
    pub status: Option<u16>,
}

/// How many changes a listing lags behind; attached to its request.
#[derive(Clone, Copy)]
pub(crate) struct Behind(pub(crate) usize);

/// A request that has arrived completely.
pub(crate) struct Received {
    pub(crate) parts: Parts,
    pub(crate) body: Bytes,
}

/// The parts of a request that faults depend on.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) client: String,
    pub(crate) bucket: String,
    pub(crate) key: String,
    pub(crate) call: Call,
    pub(crate) is_conditional: bool,
}

impl Asked {
    pub(crate) fn of(parts: &Parts, dialect: Dialect) -> Asked {
        let path = parts.uri.path().trim_start_matches('/');
        let (bucket, key) = path.split_once('/').unwrap_or((path, ""));
        let query = parts.uri.query().unwrap_or_default();
        let call = call_of(parts, key, query);
        let listed = match call {
            Call::List | Call::ListUploads => value_of(query, "prefix"),
            _ => None,
        };
        let has = |name: &str| parts.headers.contains_key(name);
        let has_match = has("if-none-match") || has("if-match");
        let (client, is_conditional) = match dialect {
            Dialect::S3 => (client_of(parts, query), has_match),
            Dialect::Google => (
                token::client_of(parts),
                has(IF_GENERATION) || (call.is_read() && has_match),
            ),
        };
        Asked {
            client: client.unwrap_or_default(),
            bucket: plain(bucket),
            key: plain(listed.unwrap_or(key)),
            call,
            is_conditional,
        }
    }
}

fn call_of(parts: &Parts, key: &str, query: &str) -> Call {
    let has = |name: &str| pairs(query).any(|(found, _)| found == name);
    let (of_object, of_upload) = (!key.is_empty(), has("uploadId"));
    match parts.method {
        Method::HEAD => Call::Head,
        Method::GET if of_upload => Call::ListParts,
        Method::GET if of_object => Call::Get,
        Method::GET if has("uploads") => Call::ListUploads,
        Method::GET => Call::List,
        Method::PUT if of_upload => Call::PutPart,
        Method::PUT if is_copy(parts) => Call::Copy,
        Method::PUT => Call::Put,
        Method::POST if of_upload => Call::Complete,
        Method::POST if of_object => Call::BeginUpload,
        Method::DELETE if of_upload => Call::Abort,
        _ => Call::Delete,
    }
}

fn is_copy(parts: &Parts) -> bool {
    let names = ["x-amz-copy-source", COPY_SOURCE];
    names.iter().any(|name| parts.headers.contains_key(*name))
}

/// The id of the key that signed a request, from its header or its query.
fn client_of(parts: &Parts, query: &str) -> Option<String> {
    let header = parts.headers.get(AUTHORIZATION);
    let header = header.and_then(|value| value.to_str().ok());
    let signed = match header.and_then(|text| text.split_once("Credential=")) {
        Some((_, scope)) => scope.to_owned(),
        None => plain(value_of(query, "X-Amz-Credential")?),
    };
    signed.split('/').next().map(str::to_owned)
}

fn pairs(query: &str) -> impl Iterator<Item = (&str, &str)> {
    query
        .split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

pub(crate) fn value_of<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    let mut found = pairs(query).filter(|(found, _)| *found == name);
    found.next().map(|(_, value)| value)
}

/// A text without percent signs, for the journal: `s3s` interprets the request itself.
fn plain(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}
