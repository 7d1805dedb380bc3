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
    #[error(
        "the identity does not open the {} wrap for {}",
        shown(kind),
        shown(recipient)
    )]
    WrongKey {
        /// The kind of the wrap.
        kind: String,
        /// Its recipient, in public.
        recipient: String,
    },
    /// A wrap is not what its kind says, or asks for more than is sensible.
    #[error(
        "the {} wrap for {} is damaged: {reason}",
        shown(kind),
        shown(recipient)
    )]
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
    /// A text or a file is no key that signs, or that signatures are checked with.
    #[error("{name}: {reason}")]
    BadSigner {
        /// The argument or the file.
        name: String,
        /// The reason, without the text of a private key.
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

/// Recipients that a message names, and characters of each: a manifest can hold any text.
const NAMED_MAX: usize = 4;
const SHOWN_CHARACTERS_MAX: usize = 100;

fn shorten(recipients: &[String]) -> String {
    let first = &recipients[..recipients.len().min(NAMED_MAX)];
    let named: Vec<_> = first.iter().map(|name| shown(name)).collect();
    match recipients.len().checked_sub(NAMED_MAX) {
        _ if recipients.is_empty() => "it has none any more".to_owned(),
        None | Some(0) => named.join(", "),
        Some(more) => format!("{} and {more} more", named.join(", ")),
    }
}

/// A text of a manifest, which anybody may have written, as a message shows it.
fn shown(text: &str) -> String {
    let mut characters = text.chars();
    let mut shown = String::new();
    for character in characters.by_ref().take(SHOWN_CHARACTERS_MAX) {
        shown.extend(character.escape_debug());
    }
    if characters.next().is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_a_manifest_are_escaped_and_short() {
        let recipients = vec!["a\u{1b}[2J\n".repeat(1000); 1000];
        let error = KeyError::NoIdentity {
            identities: 1,
            recipients,
        };
        let text = error.to_string();
        assert!(
            text.len() < 4000 && !text.contains(['\u{1b}', '\n']),
            "{text}"
        );
        assert!(text.ends_with("and 996 more"), "{text}");
        let kind = "\u{1b}".repeat(1000);
        let error = KeyError::WrongKey {
            kind: kind.clone(),
            recipient: kind,
        };
        assert!(error.to_string().len() < 4000 && !error.to_string().contains('\u{1b}'));
    }
}
