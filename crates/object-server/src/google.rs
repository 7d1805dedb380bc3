//! Google's XML API, translated to S3's calls, according to its documentation.
//!
//! A request is refused here, or becomes a request of S3 with its conditions attached; an answer
//! gets Google's headers about its object. The two differ in more than names:
//! - Writes have one condition, on the generation. `If-Match` and `If-None-Match` apply to reads;
//!   elsewhere they are ignored, like S3's headers.
//! - Uploads in parts cannot have conditions; with one they are refused.
//! - Removing an object requires that it exists, even without a condition.
//! - A request with a body states its length, even if the body is empty.
//! - A request without a token is refused with another error than one with a wrong token.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};
use http::header::{AUTHORIZATION, CONTENT_LENGTH, HeaderMap, IF_MATCH, IF_NONE_MATCH};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode};
use md5::{Digest, Md5};

use crate::bucket::Buckets;
use crate::contents::{Condition, Object};
use crate::refused::Refused;
use crate::request::{Asked, COPY_SOURCE, Call, Dialect, IF_GENERATION, Received, value_of};
use crate::token::{client_of, token_of};

/// The header with the checksums of a body, or of an object.
const HASH: &str = "x-goog-hash";

/// Translates a request to S3's.
pub(crate) fn understood(buckets: &Buckets, request: &Received) -> Result<Parts, Refused> {
    let mut parts = request.parts.clone();
    let asked = Asked::of(&parts, Dialect::Google);
    check_token(buckets, &parts, &asked)?;
    check_length(&parts)?;
    let conditions = conditions(&parts, asked.call)?;
    if matches!(asked.call, Call::Put | Call::PutPart) {
        check_hashes(&parts.headers, &request.body)?;
    }
    if parts.method == Method::POST && asked.call == Call::Delete {
        return Err(refused(
            StatusCode::NOT_IMPLEMENTED,
            "NotImplemented",
            "here objects are removed one by one",
        ));
    }
    parts.headers = headers(&parts.headers, asked.call);
    parts.extensions.insert(conditions);
    Ok(parts)
}

/// Adds Google's headers about the object to an answer.
pub(crate) fn with_hashes(mut answer: Response<Bytes>) -> Response<Bytes> {
    let Some(object) = answer.extensions_mut().remove::<Object>() else {
        return answer;
    };
    let headers = answer.headers_mut();
    headers.insert(HASH, hash("crc32c", &crc32c(&object.bytes)));
    // In a line of its own, as Google sends it; for an object assembled from parts Google has none.
    if !object.is_of_parts() {
        headers.append(HASH, hash("md5", &Md5::digest(&object.bytes)));
    }
    // For a part there are no more headers.
    if object.generation > 0 {
        headers.insert("x-goog-generation", object.generation.into());
        headers.insert("x-goog-metageneration", HeaderValue::from_static("1"));
        let identity = HeaderValue::from_static("identity");
        headers.insert("x-goog-stored-content-encoding", identity);
        let length = object.bytes.len().into();
        headers.insert("x-goog-stored-content-length", length);
    }
    answer
}

fn refused(status: StatusCode, code: &'static str, message: &'static str) -> Refused {
    Refused {
        status,
        code,
        message,
    }
}

fn check_token(buckets: &Buckets, parts: &Parts, asked: &Asked) -> Result<(), Refused> {
    if !parts.headers.contains_key(AUTHORIZATION) {
        return Err(refused(
            StatusCode::FORBIDDEN,
            "AccessDenied",
            "Access denied.",
        ));
    }
    let bucket = buckets.get(&asked.bucket);
    let is_live = |token: &str| !bucket.is_some_and(|bucket| bucket.has_expired(token));
    match token_of(parts).is_some_and(is_live) && client_of(parts).is_some() {
        true => Ok(()),
        false => Err(refused(
            StatusCode::UNAUTHORIZED,
            "AuthenticationRequired",
            "Authentication required.",
        )),
    }
}

fn check_length(parts: &Parts) -> Result<(), Refused> {
    let sends = matches!(parts.method, Method::POST | Method::PUT);
    match sends && !parts.headers.contains_key(CONTENT_LENGTH) {
        false => Ok(()),
        true => Err(refused(
            StatusCode::LENGTH_REQUIRED,
            "MissingContentLength",
            "You must provide the Content-Length HTTP header.",
        )),
    }
}

/// The conditions of a request.
fn conditions(parts: &Parts, call: Call) -> Result<Vec<Condition>, Refused> {
    let mut conditions = Vec::new();
    if call == Call::Delete {
        conditions.push(Condition::Any);
    }
    let query = parts.uri.query().unwrap_or_default();
    if let Some(version) = value_of(query, "generation") {
        conditions.push(Condition::Version(number(version)?));
    }
    let names = parts.headers.keys().map(HeaderName::as_str);
    for name in names.filter(|name| name.starts_with("x-goog-if-")) {
        let is_of_upload = matches!(
            call,
            Call::BeginUpload | Call::PutPart | Call::Complete | Call::Abort
        );
        if is_of_upload || name != IF_GENERATION {
            return Err(refused(
                StatusCode::BAD_REQUEST,
                "NotImplemented",
                "A header you provided implies functionality that is not implemented.",
            ));
        }
        let value = parts.headers[name].to_str().unwrap_or_default();
        conditions.push(Condition::Generation(number(value)?));
    }
    Ok(conditions)
}

fn number(text: &str) -> Result<u64, Refused> {
    text.parse().map_err(|_| {
        refused(
            StatusCode::BAD_REQUEST,
            "InvalidArgument",
            "Invalid argument.",
        )
    })
}

/// Compares a body with the checksums of its request.
fn check_hashes(headers: &HeaderMap, body: &Bytes) -> Result<(), Refused> {
    let of_google = headers.get_all(HASH).iter();
    let of_google = of_google.flat_map(|value| value.to_str().unwrap_or_default().split(','));
    let pairs = of_google.map(|pair| pair.trim().split_once('=').unwrap_or_default());
    let of_http = headers.get("content-md5");
    let of_http = of_http.map(|value| ("md5", value.to_str().unwrap_or_default()));
    for (name, value) in pairs.chain(of_http) {
        let invalid = || {
            refused(
                StatusCode::BAD_REQUEST,
                "InvalidDigest",
                "The checksum you specified was invalid.",
            )
        };
        let found = match name {
            "crc32c" => crc32c(body).to_vec(),
            "md5" => Md5::digest(body).to_vec(),
            _ => return Err(invalid()),
        };
        let with_hashes = BASE64.decode(value).map_err(|_| invalid())?;
        if with_hashes.len() != found.len() {
            return Err(invalid());
        }
        if with_hashes != found {
            return Err(refused(
                StatusCode::BAD_REQUEST,
                "BadDigest",
                "The checksum you specified did not match what was received.",
            ));
        }
    }
    Ok(())
}

fn hash(name: &str, bytes: &[u8]) -> HeaderValue {
    let text = format!("{name}={}", BASE64.encode(bytes));
    HeaderValue::try_from(text).expect("base64 is of no other characters")
}

/// CRC-32C as in Google's headers, before base64: the highest byte first.
fn crc32c(bytes: &[u8]) -> [u8; 4] {
    let crc = checksum(CrcAlgorithm::Crc32Iscsi, bytes);
    (crc as u32).to_be_bytes()
}

/// The headers of a request, without those that Google ignores.
fn headers(google: &HeaderMap, call: Call) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in google {
        let is_read_only = *name == IF_MATCH || *name == IF_NONE_MATCH;
        let is_dropped = *name == AUTHORIZATION
            || name.as_str().starts_with("x-amz-")
            || (is_read_only && !call.is_read());
        if name == COPY_SOURCE {
            headers.insert("x-amz-copy-source", value.clone());
        } else if !is_dropped {
            headers.append(name, value.clone());
        }
    }
    headers
}
