//! Keys of sealed checkpoints.
//!
//! A [`DataKey`] seals one attempt. A [`Wrap`] holds it encrypted for one recipient and stands in
//! the manifest; an [`Unwrap`] finds the data key among the wraps of a manifest. Keys are read into
//! a [`Keyring`], from which [`Recipients`] wrap and [`Identities`] unwrap.
//!
//! A [`SigningKey`] signs, and [`Signers`] are the keys whose signatures are accepted.
//!
//! Layer: below `penstock-store`, which seals with data keys and knows no kinds of recipients.
//! This crate knows no checkpoints.
//!
//! Secrets are overwritten when they are dropped; data keys and key-encryption keys are in locked
//! pages of their own, which no core dump has. No `Debug`, error or serialization shows one.

#![forbid(unsafe_code)]

mod age_key;
mod data_key;
mod error;
mod file;
mod generate;
mod identities;
mod kek;
mod key_file;
mod keyring;
mod kms;
mod passphrase;
mod recipients;
mod secret;
mod signing;
mod wrap;

pub use data_key::{DATA_KEY_BYTES, DataKey};
pub use error::{KeyError, Result};
pub use generate::{NewKey, generate};
pub use identities::Identities;
pub use keyring::{KEYS_MAX, Keyring};
pub use kms::{Kms, PROCESS_KEY_LIFETIME};
pub use recipients::{RECIPIENTS_MAX, Recipients};
pub use signing::{NAMESPACE, SignatureFlaw, SignatureForm, Signers, SigningKey, SigningKeyring};
pub use wrap::{Unwrap, Wrap};
