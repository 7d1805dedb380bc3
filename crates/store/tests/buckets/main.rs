//! Checkpoints in buckets, and copies of checkpoints there.

#[path = "../common/mod.rs"]
mod common;
mod mirror;
mod objects;
mod requests;
