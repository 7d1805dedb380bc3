//! Engines, and the files of file systems that they read and write.

mod conformance;
mod file_systems;
mod files;
mod long_transfers;
#[path = "../support/mod.rs"]
mod support;
