//! Why a store did not do what it was asked for, in one sentence that says what to do about it.
//!
//! An answer that refuses has a status, and mostly a body of XML with a code, which tells more. To a
//! request for the head of an object there is no body, so the status alone has to do.

use std::error::Error;
use std::fmt;
use std::io;
use std::time::Duration;

use http::StatusCode;
use http::header::{HeaderMap, RETRY_AFTER};
use object_store::client::{HttpError, HttpErrorKind};
use serde::Deserialize;

use crate::provider::Provider;

/// See the module's description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    kind: io::ErrorKind,
    text: String,
    code: String,
    /// Whether the same request may well be answered otherwise in a moment.
    pub(crate) is_passing: bool,
    /// For how long the store asks to be left alone.
    pub(crate) pause: Option<Duration>,
}

/// What a store sends with an answer that refuses; of an answer of anybody else's nothing is known.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Body {
    code: String,
    message: String,
    region: Option<String>,
}

impl Refusal {
    pub(crate) fn new(kind: io::ErrorKind, text: impl Into<String>) -> Refusal {
        Refusal {
            kind,
            text: text.into(),
            code: String::new(),
            is_passing: false,
            pause: None,
        }
    }

    /// One that may not come again.
    pub(crate) fn passing(kind: io::ErrorKind, text: impl Into<String>) -> Refusal {
        Refusal {
            is_passing: true,
            ..Refusal::new(kind, text)
        }
    }

    /// The one that an answer is.
    pub(crate) fn of_answer(
        provider: Provider,
        status: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
    ) -> Refusal {
        let text = String::from_utf8_lossy(body);
        let text = text.trim_start_matches('\u{feff}');
        let mut body: Body = quick_xml::de::from_str(text).unwrap_or_default();
        let header = |name: &str| headers.get(name)?.to_str().ok();
        if let ("", Some(code)) = (body.code.as_str(), header("x-ms-error-code")) {
            code.clone_into(&mut body.code);
        }
        let region = header("x-amz-bucket-region").map(str::to_owned);
        let region = region.or_else(|| body.region.clone()).or_else(|| {
            // "… the region 'us-east-1' is wrong; expecting 'eu-west-1'", in quotes of either kind.
            let (_, rest) = body.message.split_once("is wrong; expecting ")?;
            Some(rest.trim_matches(['\'', '"']).to_owned())
        });
        let (kind, text) = meaning(provider, status, &body, region.as_deref());
        let seconds = header(RETRY_AFTER.as_str()).and_then(|seconds| seconds.parse().ok());
        Refusal {
            is_passing: is_passing(status, &body.code),
            code: body.code,
            pause: seconds.map(Duration::from_secs),
            ..Refusal::new(kind, text)
        }
    }

    /// The one within an answer that began as a success, if there is one: what takes long is answered
    /// before it has ended.
    pub(crate) fn within(provider: Provider, body: &[u8]) -> Option<Refusal> {
        let text = std::str::from_utf8(body).ok()?;
        let body: Body = quick_xml::de::from_str(text).ok()?;
        let is_failure = !body.code.is_empty();
        is_failure.then(|| {
            let status = match body.code.as_str() {
                "InternalError" => StatusCode::INTERNAL_SERVER_ERROR,
                "SlowDown" | "ServiceUnavailable" => StatusCode::SERVICE_UNAVAILABLE,
                _ => StatusCode::BAD_REQUEST,
            };
            Refusal::of_answer(provider, status, &HeaderMap::new(), text.as_bytes())
        })
    }

    /// Why there was no answer.
    pub(crate) fn of_transport(error: &HttpError) -> Refusal {
        if let Some(refusal) = error.source().and_then(|source| source.downcast_ref()) {
            return Refusal::clone(refusal);
        }
        let cause = innermost(error);
        match error.kind() {
            HttpErrorKind::Timeout => Refusal::silent(),
            HttpErrorKind::Connect => {
                let kind = match system_error(error).map(io::Error::kind) {
                    Some(io::ErrorKind::ConnectionRefused) => io::ErrorKind::ConnectionRefused,
                    _ => io::ErrorKind::NotConnected,
                };
                let text = format!(
                    "no connection to the store ({cause}): check the endpoint, and that it runs"
                );
                Refusal::passing(kind, text)
            }
            _ => {
                let text = format!("the connection to the store broke ({cause})");
                Refusal::passing(io::ErrorKind::ConnectionReset, text)
            }
        }
    }

    /// Nothing came for too long.
    pub(crate) fn silent() -> Refusal {
        Refusal::passing(io::ErrorKind::TimedOut, "the store does not answer in time")
    }

    /// The store has made an object of other bytes, which was removed.
    pub(crate) fn of_other_bytes() -> Refusal {
        let text = "the store made an object of other bytes than it was sent";
        Refusal {
            code: OTHER_BYTES.to_owned(),
            ..Refusal::new(io::ErrorKind::InvalidData, text)
        }
    }

    /// There are no credentials, and no service of the machine that would give some.
    pub(crate) fn of_nobody(provider: Provider) -> Refusal {
        let text = format!("there are no credentials: set {}", provider.words().keys);
        Refusal::new(io::ErrorKind::PermissionDenied, text)
    }

    /// Options that make no client.
    pub(crate) fn of_options(error: &object_store::Error) -> Refusal {
        // The first says that it is one of options; others repeat what they come from.
        let mut text = String::new();
        for cause in causes(error).skip(1) {
            let cause = cause.to_string();
            if text.is_empty() {
                text = cause;
            } else if !text.contains(&cause) {
                text = format!("{text}: {cause}");
            }
        }
        Refusal::new(io::ErrorKind::InvalidInput, text)
    }

    /// A service that gives credentials gave none.
    pub(crate) fn of_service(provider: Provider, status: StatusCode) -> Refusal {
        let keys = provider.words().keys;
        let status = status.as_u16();
        let text =
            format!("no credentials were had of the service for them ({status}): set {keys}");
        Refusal::new(io::ErrorKind::PermissionDenied, text)
    }

    /// The one in an error of the library.
    pub(crate) fn of_store(error: &object_store::Error) -> Refusal {
        use object_store::Error as Store;
        for error in causes(error) {
            if let Some(refusal) = error.downcast_ref::<Refusal>() {
                return refusal.clone();
            }
            if let Some(error) = error.downcast_ref::<HttpError>() {
                return Refusal::of_transport(error);
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
            io::ErrorKind::NotFound => Refusal::new(kind, "there is no such object"),
            io::ErrorKind::AlreadyExists => Refusal::new(kind, "another object has its place"),
            _ => Refusal::new(kind, innermost(error).to_string()),
        }
    }

    /// Whether the store got other bytes than were sent.
    pub(crate) fn is_of_changed_bytes(&self) -> bool {
        self.kind == io::ErrorKind::InvalidData
    }

    /// Whether the upload is not there: it was completed, or somebody has ended it.
    pub(crate) fn is_of_no_upload(&self) -> bool {
        NO_UPLOAD.contains(&self.code.as_str())
    }

    /// Whether the condition of a request did not hold: with the same status Azure tells of leases, policies
    /// and containers, which have meanings of their own.
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

    /// Whether there is nothing by that key.
    pub(crate) fn is_of_nothing(&self) -> bool {
        self.kind == io::ErrorKind::NotFound
    }

    /// Whether the store would take it without a checksum.
    pub(crate) fn is_of_checksums(&self) -> bool {
        let names_them = self.text.to_ascii_lowercase().contains("checksum");
        names_them && !self.is_of_changed_bytes() && !self.is_passing
    }

    /// The same, after it has come so often.
    pub(crate) fn after(mut self, tries: u32, elapsed: Duration) -> Refusal {
        if tries > 1 {
            self.text = format!("{}, {tries} times in {} s", self.text, elapsed.as_secs());
        }
        self
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Error for Refusal {}

/// Whether an error is what a store of objects said, whose text says what to do about it.
pub fn says_what_to_do(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|inner| inner.is::<Refusal>())
}

/// Whether an error says that nothing is left of an upload, so that it may be begun anew: somebody has ended
/// it, or there were other bytes in it.
pub fn is_of_lost_upload(error: &io::Error) -> bool {
    let refusal: Option<&Refusal> = error.get_ref().and_then(|inner| inner.downcast_ref());
    refusal.is_some_and(|refusal| refusal.is_of_no_upload() || refusal.is_of_other_bytes())
}

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> io::Error {
        io::Error::new(refusal.kind, refusal)
    }
}

/// What stores call it that there is no object by a key; to a request for its head there is no body.
const NOTHING: [&str; 7] = [
    "",
    "NoSuchKey",
    "NoSuchVersion",
    "NoSuchObject",
    "NotFound",
    "BlobNotFound",
    "ResourceNotFound",
];

/// What they call it that there is no upload, or not what was sent of it.
const NO_UPLOAD: [&str; 2] = ["NoSuchUpload", "InvalidBlockList"];

/// An object that was made of other bytes than its parts were to have, and is gone again.
const OTHER_BYTES: &str = "OtherBytes";

/// Words of what S3 and its kin say of an object that must not be removed.
const LOCKS: [&str; 6] = [
    "object lock",
    "worm",
    "retention",
    "legal hold",
    "based hold",
    "immutable",
];

/// What an answer is for who asked.
fn meaning(
    provider: Provider,
    status: StatusCode,
    body: &Body,
    region: Option<&str>,
) -> (io::ErrorKind, String) {
    let is_misdirected = status.is_redirection() || status == StatusCode::BAD_REQUEST;
    if let (Some(region), true) = (region, is_misdirected) {
        let text = format!("the bucket is in another region: set the region to {region}");
        return (io::ErrorKind::InvalidInput, text);
    }
    let of_provider = match provider {
        Provider::Amazon => of_amazon(&body.code),
        Provider::Google => of_google(status, &body.code),
        Provider::Azure => of_azure(body),
    };
    match of_provider.or_else(|| of_any(provider, body)) {
        Some((kind, text)) => (kind, text.to_owned()),
        None => by_status(provider, status, body),
    }
}

type Meaning = (io::ErrorKind, &'static str);

const EXPIRED: &str = "the credentials have expired: renew them";

fn of_amazon(code: &str) -> Option<Meaning> {
    use io::ErrorKind::{InvalidInput, PermissionDenied};
    Some(match code {
        "InvalidAccessKeyId" | "XAdminUserNotFound" => (
            PermissionDenied,
            "the store does not know the access key: correct its id (AWS_ACCESS_KEY_ID)",
        ),
        "SignatureDoesNotMatch" => (
            PermissionDenied,
            "the secret is not that of the access key: correct it (AWS_SECRET_ACCESS_KEY)",
        ),
        "ExpiredToken" | "TokenRefreshRequired" => (
            PermissionDenied,
            "the credentials have expired: renew them (AWS_SESSION_TOKEN)",
        ),
        "InvalidToken" => (
            PermissionDenied,
            "the session token is not valid: renew the credentials (AWS_SESSION_TOKEN)",
        ),
        "PermanentRedirect" | "AuthorizationHeaderMalformed" => (
            InvalidInput,
            "the bucket is in another region: set that (AWS_REGION)",
        ),
        _ => return None,
    })
}

fn of_google(status: StatusCode, code: &str) -> Option<Meaning> {
    use io::ErrorKind::{InvalidInput, PermissionDenied};
    Some(match (code, status) {
        ("ExpiredToken", _) => (PermissionDenied, EXPIRED),
        (_, StatusCode::UNAUTHORIZED) => (
            PermissionDenied,
            "the store does not accept the token: renew the credentials \
             (GOOGLE_APPLICATION_CREDENTIALS)",
        ),
        ("UserProjectMissing", _) => (
            InvalidInput,
            "the bucket has who asks pay for it, which is not done here: save to another one",
        ),
        _ => return None,
    })
}

fn of_azure(body: &Body) -> Option<Meaning> {
    use io::ErrorKind::{InvalidData, InvalidInput, PermissionDenied};
    Some(match body.code.as_str() {
        "ContainerNotFound" => (
            InvalidInput,
            "there is no such container: create it, or correct its name",
        ),
        "ContainerBeingDeleted" => (
            InvalidInput,
            "the container is being deleted: save to another one, or wait and create it anew",
        ),
        "InvalidAuthenticationInfo" if body.message.contains("expired") => {
            (PermissionDenied, EXPIRED)
        }
        "AuthenticationFailed" | "InvalidAuthenticationInfo" | "NoAuthenticationInformation" => (
            PermissionDenied,
            "the store does not accept the key or the signature: correct AZURE_STORAGE_ACCOUNT_KEY, or \
             renew the token or SAS, and see that the clock of this machine is right",
        ),
        "BlobArchived" | "BlobBeingRehydrated" => {
            (PermissionDenied, "the blob is archived: rehydrate it first")
        }
        "PublicAccessNotPermitted" => (
            PermissionDenied,
            "the account lets nobody in without a key: set AZURE_STORAGE_ACCOUNT_KEY, or give a token",
        ),
        "KeyBasedAuthenticationNotPermitted" => (
            PermissionDenied,
            "the account takes no keys: give a penstock.Token, or have an identity that it knows",
        ),
        "AuthorizationFailure" => (
            PermissionDenied,
            "the store does not let this request in: correct AZURE_STORAGE_ACCOUNT_KEY, or look at the \
             rights of the token or SAS and at the firewall of the account",
        ),
        "AccountIsDisabled" => (PermissionDenied, "the account is disabled: enable it"),
        "Md5Mismatch" | "Crc64Mismatch" => {
            (InvalidData, "the bytes changed on their way to the store")
        }
        "LeaseIdMissing" | "BlobImmutableDueToPolicy" | "BlobUsesCustomerSpecifiedEncryption" => (
            PermissionDenied,
            "it is under a lease, a policy of immutability or another key: wait for its end, or have it \
             lifted",
        ),
        _ => return None,
    })
}

fn of_any(provider: Provider, body: &Body) -> Option<Meaning> {
    use io::ErrorKind::{InvalidData, InvalidInput, PermissionDenied, StorageFull};
    let code = body.code.as_str();
    let message = body.message.to_ascii_lowercase();
    let says = |words: &str| message.contains(words);
    Some(match code {
        "NoSuchBucket" => (
            InvalidInput,
            "there is no such bucket: create it, or correct its name",
        ),
        _ if code == "RequestTimeTooSkewed"
            || (provider == Provider::Amazon && (says("has expired") || says("not valid yet"))) =>
        {
            (
                PermissionDenied,
                "the clock of this machine is not that of the store: set it",
            )
        }
        "BadDigest" | "XAmzContentChecksumMismatch" => {
            (InvalidData, "the bytes changed on their way to the store")
        }
        _ if NO_UPLOAD.contains(&code) => (
            io::ErrorKind::Other,
            "the upload is gone: somebody has ended it, or a rule of the bucket; save again",
        ),
        _ if code == "ObjectLocked" || LOCKS.iter().any(|lock| says(lock)) => (
            PermissionDenied,
            "it is under an object lock or a legal hold: wait for its end, or have it lifted",
        ),
        "QuotaExceeded" | "XMinioStorageFull" | "XMinioAdminBucketQuotaExceeded" => {
            (StorageFull, "the store has no room left")
        }
        _ => return None,
    })
}

fn by_status(provider: Provider, status: StatusCode, body: &Body) -> (io::ErrorKind, String) {
    let mut said = status.as_u16().to_string();
    match body.code.as_str() {
        "" => said.extend(status.canonical_reason().map(|reason| format!(" {reason}"))),
        code => said = format!("{said} {code}"),
    }
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => (
            io::ErrorKind::PermissionDenied,
            format!(
                "the store does not allow it ({said}): the key has to have {}",
                provider.words().rights
            ),
        ),
        StatusCode::NOT_IMPLEMENTED | StatusCode::METHOD_NOT_ALLOWED => (
            io::ErrorKind::Unsupported,
            match body.message.as_str() {
                "" => format!("the store cannot do it ({said})"),
                message => format!("the store cannot do it ({said}: {message})"),
            },
        ),
        // Others say with this status that they know no such user.
        StatusCode::NOT_FOUND if NOTHING.contains(&body.code.as_str()) => (
            io::ErrorKind::NotFound,
            "there is no such object".to_owned(),
        ),
        StatusCode::INSUFFICIENT_STORAGE => (
            io::ErrorKind::StorageFull,
            "the store has no room left".to_owned(),
        ),
        StatusCode::RANGE_NOT_SATISFIABLE => (
            io::ErrorKind::UnexpectedEof,
            "the object has become shorter".to_owned(),
        ),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => (
            io::ErrorKind::ResourceBusy,
            format!("the store has too much to do ({said})"),
        ),
        status if status.is_server_error() => {
            (io::ErrorKind::Other, format!("the store failed ({said})"))
        }
        _ => (
            io::ErrorKind::Other,
            match body.message.as_str() {
                "" => format!("the store refused it ({said})"),
                message => format!("the store refused it ({said}: {message})"),
            },
        ),
    }
}

fn is_passing(status: StatusCode, code: &str) -> bool {
    match status {
        StatusCode::NOT_IMPLEMENTED | StatusCode::INSUFFICIENT_STORAGE => false,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => true,
        // S3 sends these two with 400: a body that came too slowly, or not all of it.
        StatusCode::BAD_REQUEST => matches!(code, "RequestTimeout" | "IncompleteBody"),
        StatusCode::CONFLICT => code == "OperationAborted",
        status => status.is_server_error(),
    }
}

/// An error, and what it comes from, to the end.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error: &&'a (dyn Error + 'static)| {
        let error: &'a (dyn Error + 'static) = *error;
        error.source()
    })
}

/// What an error comes from in the end, which says it without those that handed it on.
fn innermost<'a>(error: &'a (dyn Error + 'static)) -> &'a (dyn Error + 'static) {
    causes(error).last().expect("it begins with one")
}

/// That of the system which an error comes from.
fn system_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    causes(error).find_map(|error| error.downcast_ref::<io::Error>())
}
