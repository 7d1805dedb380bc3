//! An in-memory server of object storage with faults, as tests of a client need and no real server
//! has. It speaks S3's protocol, or the XML API of Google Cloud Storage.
//!
//! A [`Server`] answers on a local port and ends when it is dropped. Each of its [`Bucket`]s is
//! independent: it has its own objects, clock, faults of requests ([`Fault`]), order of clients,
//! and journal of requests. Tests that run in parallel share a server and no bucket.
//!
//! It makes S3's promises: every object and every upload is one register, a request takes effect at
//! one moment between its start and its answer, and a listing shows everything written before. One
//! lock provides all of that. Signatures, checksums, conditions, ranges and the rules for parts are
//! checked as S3 does. Google makes the same promises, and has conditions, checksums and tokens of
//! its own.
//!
//! It lacks versions, tags, access rules, encryption, and requests that make buckets. In Google's
//! protocol it also lacks ETags that are an MD5, generations in listings, conditions on the
//! metageneration, copies with conditions on the source, the removal of many objects by one
//! request, and signed requests.

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
