//! Jobs, their memory, and linked files.

#[path = "../common/mod.rs"]
mod common;
mod job;
mod linked;
