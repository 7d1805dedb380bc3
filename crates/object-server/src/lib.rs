//! A server of object storage in memory, with faults: what tests of a client need and no real server does. It
//! speaks S3's protocol, or the XML API of Google Cloud Storage.
//!
//! A [`Server`] answers on a port of this machine and ends when it is dropped. Each [`Bucket`] of it is a
//! world of its own: its objects, its clock, what goes wrong on the way to it ([`Fault`]), whose turn it is,
//! and a journal of who asked for what. Tests that run side by side share a server and no bucket.
//!
//! What it promises is what S3 does: every object and every upload is one register, a request takes effect in
//! one moment between its beginning and its answer, and a listing shows all that was written before. All of
//! that is one lock. Signatures, checksums, conditions, ranges and the rules for parts are checked as S3 does.
//! Google promises the same, and has conditions, checksums and tokens of its own.
//!
//! What it does not have: versions, tags, access rules, encryption, and buckets that requests make. Of Google's
//! also not: ETags that are an MD5, generations in listings, conditions on the metageneration, copies with
//! conditions on what is copied, the removal of many objects by one request, and signed requests.

#![forbid(unsafe_code)]

mod bucket;
mod contents;
mod fault;
mod google;
mod line;
mod refused;
mod request;
mod server;
mod service;
mod token;
mod turns;

pub use bucket::Bucket;
pub use contents::{Object, OpenUpload};
pub use fault::Fault;
pub use request::{Call, Entry};
pub use server::{OBSERVER, Server};
pub use token::{SECRET, token};
