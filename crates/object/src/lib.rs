//! Objects of S3 and its kin, as the files of a checkpoint.
//!
//! [`Objects`] is a [`FileSystem`](penstock_io::file_system::FileSystem) whose paths are URLs, and
//! [`Objects::engine`] moves the bytes of its files. What a checkpoint is, this crate does not know.
//!
//! An object is there whole or not at all, is never changed in part, and has no directory: a
//! directory is what keys have in common, it is there with the first of them, and making, syncing and
//! removing one does nothing. No lock is seen by all.
//!
//! Objects of S3 and of stores that speak its protocol, of Google's Cloud Storage and of Azure's Blob
//! Storage: what differs between them is in `provider`, `access` and `uploads`.
//!
//! This is the one crate with an asynchronous runtime; nothing of it shows.

#![forbid(unsafe_code)]

mod access;
mod address;
mod answers;
mod ask;
pub mod buckets;
mod conditional;
mod connection;
mod continued;
mod credentials;
mod engine;
mod handle;
mod kin;
mod meaning;
mod objects;
mod probe;
mod profile;
mod provider;
mod refusal;
mod remote;
mod requests;
mod runtime;
mod signed;
mod tries;
mod uploads;
mod yes;

pub use address::Address;
pub use continued::Continued;
pub use credentials::{AskForKeys, Credentials, Keys};
pub use objects::Objects;
pub use probe::{Finding, Verdict, probe};
pub use provider::{Provider, SCHEMES};
pub use refusal::{is_of_lost_upload, says_what_to_do};
pub use remote::Remote;
pub use uploads::{OpenUpload, Part};
