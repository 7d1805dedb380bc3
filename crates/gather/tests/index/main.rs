//! What a cache keeps, against naive models of what it promises.

mod models;
mod policies;
mod traces;
mod window;
