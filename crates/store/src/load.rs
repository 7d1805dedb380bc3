//! Reading a complete checkpoint: opening it, and loading into new memory or the caller's.

pub mod check;
pub mod checkpoint;
pub mod fill;
pub mod open;
pub(crate) mod sidecar;
pub(crate) mod signed;
