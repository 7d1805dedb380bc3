//! Measures the path between the host and a GPU with the same driver as the rest of the engine,
//! without PyTorch.
//!
//! [`DriverProbe`] lists the driver and its devices, [`link`](fn@link) measures the speed of a device's
//! copy engine, [`pinning`] the cost of pinning memory, and [`self_test`] checks that copies
//! arrive unchanged.

mod link;
mod pinning;
mod probe;
mod self_test;

pub use link::{Link, LinkJob, Rate, Way, link};
pub use pinning::{Pinning, pinning};
pub use probe::{DeviceProbe, DriverProbe};
pub use self_test::{SelfTest, self_test};
