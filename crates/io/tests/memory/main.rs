//! Memory of callers, on the host and on devices.

mod arrays;
mod regions;
mod staging;
