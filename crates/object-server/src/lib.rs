//! A server of S3's protocol in memory, with faults: what tests of a client need and no real server does.
//!
//! A [`Server`] answers on a port of this machine and ends when it is dropped. Each [`Bucket`] of it is a
//! world of its own: its objects, its clock, what goes wrong on the way to it ([`Fault`]), whose turn it is,
//! and a journal of who asked for what. Tests that run side by side share a server and no bucket.
//!
//! What it promises is what S3 does: every object and every upload is one register, a request takes effect in
//! one moment between its beginning and its answer, and a listing shows all that was written before. All of
//! that is one lock. Signatures, checksums, conditions, ranges and the rules for parts are checked as S3 does.
//!
//! What it does not have: versions, tags, access rules, encryption, and buckets that requests make.

#![forbid(unsafe_code)]

mod bucket;
mod contents;
mod fault;
mod request;
mod server;
mod service;
mod turns;

pub use bucket::Bucket;
pub use contents::{Object, OpenUpload};
pub use fault::Fault;
pub use request::{Call, Entry};
pub use server::{OBSERVER, Server};
pub use service::SECRET;
