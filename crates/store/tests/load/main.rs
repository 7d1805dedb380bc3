//! Loading checkpoints, and detecting those that differ from what was saved.

mod boxes;
#[path = "../common/mod.rs"]
mod common;
mod corpus;
mod damage;
mod depth;
mod hostile;
mod links;
mod replica;
mod reread;
mod round_trip;
