//! Errors of a store, each in one sentence with its remedy.
//!
//! An error response has a status and usually an XML body with a code, which is more precise.
//! A HEAD request has no body in its response, so only the status is known.

pub(crate) mod answers;
mod error_codes;

use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderMap, RETRY_AFTER};
use object_store::client::{HttpError, HttpErrorKind};

use self::error_codes::{Body, NO_UPLOAD, explain, is_passing};
use crate::provider::Provider;

/// An error of a store, in one sentence with its remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestError {
    kind: io::ErrorKind,
    text: String,
    code: String,
    /// Whether a retry of the same request may soon succeed.
    pub(crate) is_passing: bool,
    /// The pause before a retry that the store asks for.
    pub(crate) pause: Option<Duration>,
}

impl RequestError {
    pub(crate) fn new(kind: io::ErrorKind, text: impl Into<String>) -> RequestError {
        RequestError {
            kind,
            text: text.into(),
            code: String::new(),
            is_passing: false,
            pause: None,
        }
    }

    /// An error that a retry may not repeat.
    pub(crate) fn passing(kind: io::ErrorKind, text: impl Into<String>) -> RequestError {
        RequestError {
            is_passing: true,
            ..RequestError::new(kind, text)
        }
    }

    /// The error in a response.
    pub(crate) fn of_answer(
        provider: Provider,
        status: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
    ) -> RequestError {
        let text = String::from_utf8_lossy(body);
        let text = text.trim_start_matches('\u{feff}');
        let mut body: Body = quick_xml::de::from_str(text).unwrap_or_default();
        let header = |name: &str| headers.get(name)?.to_str().ok();
        if let ("", Some(code)) = (body.code.as_str(), header("x-ms-error-code")) {
            code.clone_into(&mut body.code);
        }
        let region = header("x-amz-bucket-region").map(str::to_owned);
        let region = region.or_else(|| body.region.clone()).or_else(|| {
            // "… the region 'us-east-1' is wrong; expecting 'eu-west-1'", in single or double
            // quotes.
            let (_, rest) = body.message.split_once("is wrong; expecting ")?;
            Some(rest.trim_matches(['\'', '"']).to_owned())
        });
        let (kind, text) = explain(provider, status, &body, region.as_deref());
        let seconds = header(RETRY_AFTER.as_str()).and_then(|seconds| seconds.parse().ok());
        RequestError {
            is_passing: is_passing(status, &body.code),
            code: body.code,
            pause: seconds.map(Duration::from_secs),
            ..RequestError::new(kind, text)
        }
    }

    /// The error in the body of a successful response, if any: a slow request is answered before
    /// it has finished.
    pub(crate) fn within(provider: Provider, body: &[u8]) -> Option<RequestError> {
        let text = std::str::from_utf8(body).ok()?;
        let body: Body = quick_xml::de::from_str(text).ok()?;
        let is_failure = !body.code.is_empty();
        is_failure.then(|| {
            let status = match body.code.as_str() {
                "InternalError" => StatusCode::INTERNAL_SERVER_ERROR,
                "SlowDown" | "ServiceUnavailable" => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::BAD_REQUEST,
            };
            RequestError::of_answer(provider, status, &HeaderMap::new(), text.as_bytes())
        })
    }

    /// Why there was no response.
    pub(crate) fn of_transport(error: &HttpError) -> RequestError {
        if let Some(request_error) = error.source().and_then(|source| source.downcast_ref()) {
            return RequestError::clone(request_error);
        }
        let cause = innermost(error);
        match error.kind() {
            HttpErrorKind::Timeout => RequestError::silent(),
            HttpErrorKind::Connect => {
                let kind = match system_error(error).map(io::Error::kind) {
                    Some(io::ErrorKind::ConnectionRefused) => io::ErrorKind::ConnectionRefused,
                    _ => io::ErrorKind::NotConnected,
                };
                let text = format!(
                    "no connection to the store ({cause}): check the endpoint, and that it runs"
                );
                RequestError::passing(kind, text)
            }
            _ => {
                let text = format!("the connection to the store broke ({cause})");
                RequestError::passing(io::ErrorKind::ConnectionReset, text)
            }
        }
    }

    /// The store was silent for too long.
    pub(crate) fn silent() -> RequestError {
        RequestError::passing(io::ErrorKind::TimedOut, "the store does not answer in time")
    }

    /// A response that makes no sense; one of its bits may have flipped on the way.
    pub(crate) fn nonsense(what: &str) -> RequestError {
        let text = format!("the store does not answer as it should: {what}");
        RequestError::passing(io::ErrorKind::InvalidData, text)
    }

    /// The store made an object of other bytes, and the object was removed.
    pub(crate) fn of_other_bytes() -> RequestError {
        let text = "the store made an object of other bytes than it was sent";
        RequestError {
            code: OTHER_BYTES.to_owned(),
            ..RequestError::new(io::ErrorKind::InvalidData, text)
        }
    }

    /// No credentials are set, and the machine has no service that provides any.
    pub(crate) fn of_nobody(provider: Provider) -> RequestError {
        let text = format!("there are no credentials: set {}", provider.words().keys);
        RequestError::new(io::ErrorKind::PermissionDenied, text)
    }

    /// Options that no client can be made from.
    pub(crate) fn of_options(error: &object_store::Error) -> RequestError {
        // The first cause only says that options are wrong; each cause repeats its source.
        let mut text = String::new();
        for cause in causes(error).skip(1) {
            let cause = cause.to_string();
            if text.is_empty() {
                text = cause;
            } else if !text.contains(&cause) {
                text = format!("{text}: {cause}");
            }
        }
        RequestError::new(io::ErrorKind::InvalidInput, text)
    }

    /// A credential service returned an error.
    pub(crate) fn of_service(provider: Provider, status: StatusCode) -> RequestError {
        let (keys, code) = (provider.words().keys, status.as_u16());
        let text = format!("no credentials were had of the service for them ({code}): set {keys}");
        RequestError {
            is_passing: is_passing(status, ""),
            ..RequestError::new(io::ErrorKind::PermissionDenied, text)
        }
    }

    /// The error within an error of the library.
    pub(crate) fn of_store(error: &object_store::Error) -> RequestError {
        use object_store::Error as Store;
        for error in causes(error) {
            if let Some(request_error) = error.downcast_ref::<RequestError>() {
                return request_error.clone();
            }
            if let Some(error) = error.downcast_ref::<HttpError>() {
                return RequestError::of_transport(error);
            }
        }
        let kind = match error {
            Store::NotFound { .. } => io::ErrorKind::NotFound,
            Store::AlreadyExists { .. } | Store::Precondition { .. } => {
                io::ErrorKind::AlreadyExists
            }
            Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => {
                io::ErrorKind::PermissionDenied
            }
            Store::NotSupported { .. } | Store::NotImplemented { .. } => io::ErrorKind::Unsupported,
            Store::InvalidPath { .. } => io::ErrorKind::InvalidInput,
            _ => io::ErrorKind::Other,
        };
        match kind {
            io::ErrorKind::NotFound => RequestError::new(kind, "there is no such object"),
            io::ErrorKind::AlreadyExists => RequestError::new(kind, "another object has its place"),
            _ => RequestError::new(kind, innermost(error).to_string()),
        }
    }

    /// The error within a library error about a store's response. An unrecognised one is an
    /// unintelligible response.
    pub(crate) fn of_request(error: &object_store::Error) -> RequestError {
        use object_store::Error::{Generic, InvalidPath};
        let is_known =
            |cause: &(dyn Error + 'static)| cause.is::<RequestError>() || cause.is::<HttpError>();
        match error {
            // A key that no object can have.
            InvalidPath { .. } => RequestError::nonsense(&innermost(error).to_string()),
            Generic { .. } if !causes(error).any(is_known) && !is_of_service(error) => {
                RequestError::nonsense(&innermost(error).to_string())
            }
            error => RequestError::of_store(error),
        }
    }

    /// Whether the store received other bytes than were sent.
    pub(crate) fn is_of_changed_bytes(&self) -> bool {
        self.kind == io::ErrorKind::InvalidData
    }

    /// Whether the upload does not exist: it was completed or aborted.
    pub(crate) fn is_of_no_upload(&self) -> bool {
        NO_UPLOAD.contains(&self.code.as_str())
    }

    /// Whether the condition of a request failed. Azure uses the same status for leases, policies
    /// and containers, which have other kinds.
    pub(crate) fn is_of_condition(&self, status: StatusCode, is_read: bool) -> bool {
        let may_be = match status {
            StatusCode::PRECONDITION_FAILED => true,
            StatusCode::CONFLICT => !is_read,
            _ => false,
        };
        may_be && self.kind == io::ErrorKind::Other
    }

    /// Whether the store has made an object of other bytes.
    pub(crate) fn is_of_other_bytes(&self) -> bool {
        self.code == OTHER_BYTES
    }

    /// Whether the key has no object.
    pub(crate) fn is_of_nothing(&self) -> bool {
        self.kind == io::ErrorKind::NotFound
    }

    /// Turns "not found" into an unintelligible response, for a request that creates an object.
    pub(crate) fn of_making(self) -> RequestError {
        match self.is_of_nothing() {
            true => RequestError::nonsense("there is no such object, which was to be made"),
            false => self,
        }
    }

    /// Whether the store would accept the request without a checksum.
    pub(crate) fn is_of_checksums(&self) -> bool {
        let names_them = self.text.to_ascii_lowercase().contains("checksum");
        names_them && !self.is_of_changed_bytes() && !self.is_passing
    }

    /// Adds the number of attempts and their duration to the text.
    pub(crate) fn after(mut self, tries: u32, elapsed: Duration) -> RequestError {
        if tries > 1 {
            self.text = format!("{}, {tries} times in {} s", self.text, elapsed.as_secs());
        }
        self
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for RequestError {}

/// Code of the error for an object whose bytes differ from its parts, which was removed.
const OTHER_BYTES: &str = "OtherBytes";

/// Whether an error is a store's, whose text contains the remedy.
pub fn says_what_to_do(error: &io::Error) -> bool {
    error
        .get_ref()
        .is_some_and(|inner| inner.is::<RequestError>())
}

/// Whether an error says that an upload is lost and must begin again: it was aborted, or it had
/// other bytes.
pub fn is_of_lost_upload(error: &io::Error) -> bool {
    let request_error: Option<&RequestError> =
        error.get_ref().and_then(|inner| inner.downcast_ref());
    request_error.is_some_and(|request_error| {
        request_error.is_of_no_upload() || request_error.is_of_other_bytes()
    })
}

impl From<RequestError> for io::Error {
    fn from(request_error: RequestError) -> io::Error {
        io::Error::new(request_error.kind, request_error)
    }
}

/// An error and all of its sources.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| {
        let error: &'a (dyn Error + 'static) = *error;
        error.source()
    })
}

/// The last source of an error.
fn innermost<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    causes(error).last().expect("it begins with one")
}

/// Whether a library error comes from an error status. The library never sees those of the store's
/// own responses, so it comes from a credential service. The library exports no type for it.
fn is_of_service(error: &object_store::Error) -> bool {
    causes(error).any(|cause| cause.to_string().contains("returned non-2xx status code"))
}

/// The operating system's error among the sources.
fn system_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    causes(error).find_map(|error| error.downcast_ref::<io::Error>())
}
