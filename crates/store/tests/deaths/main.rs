//! Processes that die and power that fails, before any operation of a save.

#[path = "../common/mod.rs"]
mod common;
mod every_step;
mod kill;
mod power_cut;
