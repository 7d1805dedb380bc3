//! Finding damage, and recovering what is intact.

#[path = "../common/mod.rs"]
mod common;
mod flips;
mod salvage;
mod salvage_ranks;
mod verdicts;
