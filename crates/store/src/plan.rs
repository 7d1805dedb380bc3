//! Plans: decide where every byte goes before any is moved. Pure; no I/O happens here.

pub mod read;
pub(crate) mod reshard;
pub mod write;
