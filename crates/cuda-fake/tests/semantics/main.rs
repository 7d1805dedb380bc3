//! Tests the library's promises through the calls that code under test makes.

#![allow(unsafe_code)]

mod capture;
mod context;
mod copies;
mod delays;
mod device;
mod events;
mod failures;
mod fork;
mod kernels;
mod memory;
mod pinned;
mod raw;
mod streams;
