//! Jobs on storage, and measurements of a device.

mod gpu;
mod jobs;
