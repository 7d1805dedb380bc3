//! Finding damage, and recovering what is intact.

mod flips;
mod salvage;
mod salvage_ranks;
mod verdicts;
