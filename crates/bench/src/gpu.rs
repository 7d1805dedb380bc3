//! What lies between the host and a GPU, by the driver that everything else here uses, without PyTorch.
//!
//! [`Found`] says which driver and devices there are, [`link`](fn@link) how fast a device's copy engine is, [`pinning`]
//! what it costs to pin memory, and [`self_test`] whether what is copied is what was there.

mod found;
mod link;
mod pinning;
mod self_test;

pub use found::{DeviceFound, Found};
pub use link::{Link, LinkJob, Rate, Way, link};
pub use pinning::{Pinning, pinning};
pub use self_test::{SelfTest, self_test};
