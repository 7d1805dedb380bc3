//! Rows and ranges, read by requests that are merged.

#[path = "../common/mod.rs"]
mod common;
mod ranges;
mod rows;
