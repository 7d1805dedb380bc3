//! Plans: where every byte goes, decided before any is moved. Pure; no I/O happens here.

pub mod read;
pub(crate) mod reshard;
pub mod write;
