//! One write, its memory, and files that it links to.

#[path = "../common/mod.rs"]
mod common;
mod job;
mod linked;
