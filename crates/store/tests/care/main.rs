//! What is found of damage, and what comes out of it.

#[path = "../common/mod.rs"]
mod common;
mod flips;
mod salvage;
mod salvage_ranks;
mod verdicts;
