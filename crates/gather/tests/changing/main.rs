//! Tables that change: every row is the one that was written last, whatever is cached, folded,
//! reopened, slow, failed or cut off.

mod cuts;
mod explore;
mod mutant;
mod operations;
mod threads;
mod world;
