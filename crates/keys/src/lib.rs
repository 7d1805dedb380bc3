//! Keys of sealed checkpoints.
//!
//! A [`DataKey`] seals one attempt. A [`Wrap`] holds it encrypted for one recipient and stands in
//! the manifest; an [`Unwrap`] finds the data key among the wraps of a manifest.
//!
//! Layer: below `penstock-store`, which seals with data keys and knows no kinds of recipients.
//! This crate knows no checkpoints.
//!
//! Secrets are zeroized when they are dropped. No `Debug`, error or serialization shows one.

#![forbid(unsafe_code)]

mod data_key;
mod error;
mod wrap;

pub use data_key::{DATA_KEY_BYTES, DataKey};
pub use error::{KeyError, Result};
pub use wrap::{Unwrap, Wrap};
