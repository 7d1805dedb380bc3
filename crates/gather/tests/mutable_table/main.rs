//! Mutable tables: every row is the one written last, with caching, compaction, reopening, slow
//! and failing I/O, and power cuts.

mod cuts;
mod explore;
mod mutant;
mod operations;
mod threads;
mod world;
