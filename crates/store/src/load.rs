//! Reading a complete checkpoint: opened, into fresh memory or the caller's.

pub mod check;
pub mod checkpoint;
pub mod fill;
