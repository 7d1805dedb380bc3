//! What a test can set before it begins: how many devices, how large, how slow, of which version.
//!
//! Each setting that a program in another language needs has a variable of the environment, which is read
//! when the library is first called and at each reset.

use std::collections::HashMap;
use std::env;

/// The settings, with the defaults of a reset.
pub(crate) struct Config {
    /// Where the delays come from: the same seed and the same order of calls give the same delays.
    pub(crate) seed: u64,
    pub(crate) devices: i32,
    /// The memory of each device.
    pub(crate) memory_bytes: u64,
    /// The longest delay of one operation; 0 for none.
    pub(crate) delay_us_max: u64,
    /// As `cuDriverGetVersion` counts: 1000 × major + 10 × minor.
    pub(crate) driver_version: i32,
    /// What a device says of itself other than the table below, by device and attribute.
    pub(crate) attributes: HashMap<(i32, i32), i32>,
    /// How many bytes of host memory may be pinned at a time.
    pub(crate) pinned_bytes_max: u64,
    /// Whether host memory may be pinned at all.
    pub(crate) pinning_permitted: bool,
    /// Whether cuFile goes past memory of the host.
    pub(crate) cufile_is_direct: bool,
    /// Whether copies to pinned memory bring something else, and nobody is told.
    pub(crate) garbles: bool,
}

impl Config {
    /// The defaults, or what the environment says.
    pub(crate) fn from_environment() -> Config {
        Config {
            seed: number("PENSTOCK_FAKE_SEED").unwrap_or(0),
            devices: number("PENSTOCK_FAKE_DEVICES").map_or(1, |count| count.min(64) as i32),
            memory_bytes: number("PENSTOCK_FAKE_MEMORY_BYTES").unwrap_or(1 << 30),
            delay_us_max: number("PENSTOCK_FAKE_DELAY_US").unwrap_or(0),
            driver_version: number("PENSTOCK_FAKE_DRIVER_VERSION")
                .and_then(|version| i32::try_from(version).ok())
                .unwrap_or(13_020),
            attributes: HashMap::new(),
            pinned_bytes_max: number("PENSTOCK_FAKE_PINNED_BYTES").unwrap_or(u64::MAX),
            pinning_permitted: number("PENSTOCK_FAKE_PINNING_PERMITTED") != Some(0),
            cufile_is_direct: number("PENSTOCK_FAKE_CUFILE_DIRECT") == Some(1),
            garbles: number("PENSTOCK_FAKE_GARBLES") == Some(1),
        }
    }

    /// What a device says of itself; an H100's figures where they matter, 0 for all else.
    pub(crate) fn attribute(&self, device: i32, attribute: i32) -> i32 {
        if let Some(value) = self.attributes.get(&(device, attribute)) {
            return *value;
        }
        match attribute {
            // PCI_BUS_ID.
            33 => device + 1,
            _ => ATTRIBUTES
                .iter()
                .find(|(known, _)| *known == attribute)
                .map_or(0, |(_, value)| *value),
        }
    }
}

const ATTRIBUTES: &[(i32, i32)] = &[
    (1, 1024),      // MAX_THREADS_PER_BLOCK
    (2, 1024),      // MAX_BLOCK_DIM_X
    (5, i32::MAX),  // MAX_GRID_DIM_X
    (10, 32),       // WARP_SIZE
    (11, i32::MAX), // MAX_PITCH
    (16, 132),      // MULTIPROCESSOR_COUNT
    (19, 1),        // CAN_MAP_HOST_MEMORY
    (31, 1),        // CONCURRENT_KERNELS
    (39, 2048),     // MAX_THREADS_PER_MULTIPROCESSOR
    (40, 3),        // ASYNC_ENGINE_COUNT
    (41, 1),        // UNIFIED_ADDRESSING
    (75, 9),        // COMPUTE_CAPABILITY_MAJOR
    (76, 0),        // COMPUTE_CAPABILITY_MINOR
    (78, 1),        // STREAM_PRIORITIES_SUPPORTED
    (91, 1),        // CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    (99, 1),        // HOST_REGISTER_SUPPORTED
    (113, 1),       // READ_ONLY_HOST_REGISTER_SUPPORTED
    (134, -1),      // HOST_NUMA_ID: no node
];

/// A number of the environment. What is no number counts as not set: a driver has nobody to tell.
fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}
