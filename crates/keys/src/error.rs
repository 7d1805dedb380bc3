//! Errors of this crate.

use std::io;
use std::path::PathBuf;

/// The result of every fallible call in this crate.
pub type Result<T> = std::result::Result<T, KeyError>;

/// A key is not available. No variant holds a secret, nor the text of an identity.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// No identity belongs to a recipient of the checkpoint.
    #[error(
        "none of the identities ({identities}) belongs to a recipient of the checkpoint: {}",
        shorten(recipients)
    )]
    NoIdentity {
        /// Number of identities.
        identities: usize,
        /// The recipients, in public.
        recipients: Vec<String>,
    },
    /// An identity belongs to the recipient, or may, and does not open its wrap.
    #[error("the identity does not open the {kind} wrap for {recipient}")]
    WrongKey {
        /// The kind of the wrap.
        kind: String,
        /// Its recipient, in public.
        recipient: String,
    },
    /// A wrap is not what its kind says, or asks for more than is sensible.
    #[error("the {kind} wrap for {recipient} is damaged: {reason}")]
    BadWrap {
        /// The kind of the wrap.
        kind: String,
        /// Its recipient, in public.
        recipient: String,
        /// The reason.
        reason: String,
    },
    /// A file holds no recipients, or no identities.
    #[error("{}{}: {reason}", path.display(), line.map_or(String::new(), |line| format!(", line {line}")))]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: Option<usize>,
        /// The reason, without the line's text.
        reason: String,
    },
    /// A recipient or an identity is not understood.
    #[error("{name}: {reason}")]
    BadText {
        /// The argument, such as `recipients[2]`.
        name: String,
        /// The reason, without the text if that is secret.
        reason: String,
    },
    /// A file cannot be read or written.
    #[error("{}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A key management service has refused, or is not reachable.
    #[error("{uri}: {reason}")]
    Kms {
        /// The key.
        uri: String,
        /// The client's reason.
        reason: String,
        /// The client's error.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },
    /// The system has no random numbers.
    #[error("the system gives no random numbers")]
    Entropy,
}

/// Recipients that a message names.
const NAMED_MAX: usize = 4;

fn shorten(recipients: &[String]) -> String {
    let named = recipients[..recipients.len().min(NAMED_MAX)].join(", ");
    match recipients.len().checked_sub(NAMED_MAX) {
        None | Some(0) => named,
        Some(more) => format!("{named} and {more} more"),
    }
}
