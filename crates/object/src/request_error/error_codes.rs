//! Maps the error codes of each provider to errors with a remedy.

use std::io;

use http::StatusCode;
use serde::Deserialize;

use crate::provider::Provider;

/// Body of an error response; empty if it is not in the stores' XML.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Body {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) region: Option<String>,
}

/// Codes for a missing object; the response to a HEAD request has no body.
const NOTHING: [&str; 7] = [
    "",
    "NoSuchKey",
    "NoSuchVersion",
    "NoSuchObject",
    "NotFound",
    "BlobNotFound",
    "ResourceNotFound",
];

/// Codes for a missing upload or missing parts.
pub(crate) const NO_UPLOAD: [&str; 2] = ["NoSuchUpload", "InvalidBlockList"];

/// Words in the messages with which S3-compatible stores protect an object from removal.
const LOCKS: [&str; 6] = [
    "object lock",
    "worm",
    "retention",
    "legal hold",
    "based hold",
    "immutable",
];

/// The kind and message of an error response.
pub(crate) fn explain(
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

type Explanation = (io::ErrorKind, &'static str);

const EXPIRED: &str = "the credentials have expired: renew them";

fn of_amazon(code: &str) -> Option<Explanation> {
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

fn of_google(status: StatusCode, code: &str) -> Option<Explanation> {
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

fn of_azure(body: &Body) -> Option<Explanation> {
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

fn of_any(provider: Provider, body: &Body) -> Option<Explanation> {
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
        // Some stores use this status for an unknown user.
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

/// Whether a retry of the same request may soon succeed.
pub(crate) fn is_passing(status: StatusCode, code: &str) -> bool {
    match status {
        StatusCode::NOT_IMPLEMENTED | StatusCode::INSUFFICIENT_STORAGE => false,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT => true,
        // S3 sends 400 with these codes for a body that came too slowly or incomplete.
        StatusCode::BAD_REQUEST => matches!(code, "RequestTimeout" | "IncompleteBody"),
        // Another request for the same key was in progress, or a proxy sent no more than the
        // status. A failed condition is decided elsewhere.
        StatusCode::CONFLICT => {
            matches!(code, "" | "OperationAborted" | "ConditionalRequestConflict")
        }
        status => status.is_server_error(),
    }
}
