//! Sealed and signed checkpoints.

#[path = "../common/mod.rs"]
mod common;
mod seal;
mod signed;
