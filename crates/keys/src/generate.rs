//! New keys, in files of their own.

use std::path::Path;

use jiff::Timestamp;
use zeroize::Zeroizing;

use crate::age_key::AgeIdentity;
use crate::key_file::KeyFile;
use crate::{Result, file};

/// Kinds of keys that can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewKey {
    /// A pair of X25519 keys: the public one is given to those who save.
    X25519,
    /// One symmetric key: those who save need the file, too.
    KeyFile,
}

/// Makes a key and writes its file, which only its owner can read.
///
/// Returns the key's name in public: `age1…`, or the fingerprint of a symmetric key.
///
/// # Errors
///
/// [`crate::KeyError::Io`] if the file exists or cannot be written,
/// [`crate::KeyError::Entropy`].
pub fn generate(path: &Path, kind: NewKey) -> Result<String> {
    let (public, label, secret) = match kind {
        NewKey::X25519 => {
            let identity = AgeIdentity::generate();
            let secret = identity.to_text().expect("an X25519 key has a text");
            (identity.public().to_string(), "public key", secret)
        }
        NewKey::KeyFile => {
            let key = KeyFile::generate()?;
            (key.fingerprint().to_owned(), "fingerprint", key.to_text())
        }
    };
    let created = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ");
    let head = format!("# created: {created}\n# {label}: {public}\n");
    // The string has its final size: one that grows leaves copies in freed memory.
    let mut content = Zeroizing::new(String::with_capacity(head.len() + secret.len() + 1));
    content.push_str(&head);
    content.push_str(&secret);
    content.push('\n');
    file::write_new(path, content.as_bytes())?;
    Ok(public)
}
