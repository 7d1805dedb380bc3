//! Keys that sign a text, and keys that such signatures are checked with.
//!
//! Two forms, each of which other tools check: an OpenSSF bundle (DSSE, EC P-256), which
//! `model_signing verify key` accepts, and an ssh signature (Ed25519), which `ssh-keygen -Y verify`
//! accepts. The text is a statement about files; this crate does not read it.

mod bundle;
mod ec;
mod key;
mod signers;
mod ssh;

pub use key::{SignatureForm, SigningKey, SigningKeyring};
pub use signers::Signers;
pub use ssh::NAMESPACE;

/// A signature is not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureFlaw {
    /// It was made with a key that is none of the expected ones.
    #[error("{signer} signed it, which is none of the expected keys")]
    Untrusted {
        /// The key in public, as the signature names it.
        signer: String,
    },
    /// It does not belong to the text, or is no signature.
    #[error("{0}")]
    Bad(String),
}

fn bad(reason: impl Into<String>) -> SignatureFlaw {
    SignatureFlaw::Bad(reason.into())
}
