//! The files of a checkpoint: their contents, their names, and how they are opened.
//!
//! All parsed input is treated as hostile. Nothing here changes a file.

pub(crate) mod description;
pub(crate) mod directory;
pub(crate) mod name;
pub(crate) mod plain;
pub(crate) mod tombstone;
pub(crate) mod tree;

pub mod digest;
pub mod dtype;
pub mod header;
pub mod index;
pub mod manifest;
pub mod part;
pub mod shard;
