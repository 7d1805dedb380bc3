//! Reading a complete checkpoint: opened, into fresh memory or the caller's.

pub mod checkpoint;
pub mod fill;
