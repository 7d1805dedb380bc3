//! Checks the cache's contents against naive models of its policies.

mod models;
mod policies;
mod traces;
mod window;
