//! Object stores (S3, Google Cloud Storage, Azure Blob Storage) as the file system of a
//! checkpoint.
//!
//! [`Objects`] is a [`FileSystem`](penstock_io::file_system::FileSystem) whose paths are URLs,
//! and [`Objects::engine`] moves the bytes of its files. This crate does not know the checkpoint
//! format.
//!
//! An object exists whole or not at all and is never modified in part. A directory is a common
//! prefix of keys: it exists while a key has it, and creating, syncing and removing one does
//! nothing. No lock is visible to all clients.
//!
//! Supported are S3 and stores that speak its protocol, Google Cloud Storage and Azure Blob
//! Storage; their differences are in `provider`, `client::access` and
//! `client::uploads`.
//!
//! Only this crate has an asynchronous runtime; its public functions are synchronous.

#![forbid(unsafe_code)]

mod address;
pub mod buckets;
mod client;
mod objects;
mod probe;
mod provider;
mod remote;
mod request_error;
mod runtime;

pub use address::Address;
pub use client::uploads::{OpenUpload, Part};
pub use objects::Objects;
pub use objects::resume_upload::ResumedUpload;
pub use probe::{Finding, Verdict, probe};
pub use provider::{Provider, SCHEMES};
pub use remote::Remote;
pub use remote::credentials::{AskForKeys, Credentials, Keys};
pub use request_error::{is_of_lost_upload, says_what_to_do};
