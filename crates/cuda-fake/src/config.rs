//! Settings for a test: number, size, speed and version of the devices, and more.
//!
//! Each setting that a program in another language needs has an environment variable, which is read
//! at the first call of the library and at each reset.

use std::collections::HashMap;
use std::env;

/// The settings, with the defaults of a reset.
pub(crate) struct Config {
    /// The seed of delays: the same seed and the same order of calls give the same delays.
    pub(crate) seed: u64,
    pub(crate) devices: i32,
    /// The memory of each device.
    pub(crate) memory_bytes: u64,
    /// The longest delay of one operation; 0 for none.
    pub(crate) delay_us_max: u64,
    /// In the format of `cuDriverGetVersion`: 1000 × major + 10 × minor.
    pub(crate) driver_version: i32,
    /// Attributes that differ from the table below, by device and attribute.
    pub(crate) attributes: HashMap<(i32, i32), i32>,
    /// The most bytes of host memory that may be pinned at a time.
    pub(crate) pinned_bytes_max: u64,
    /// Whether host memory may be pinned at all.
    pub(crate) pinning_permitted: bool,
    /// Whether cuFile bypasses host memory.
    pub(crate) cufile_is_direct: bool,
    /// Whether copies to pinned memory silently deliver wrong bytes.
    pub(crate) garbles: bool,
}

impl Config {
    /// The defaults, overridden by the environment.
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

    /// An attribute of a device; an H100's values where they matter, else 0.
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

/// A number from the environment. Anything else counts as unset, as a driver cannot report it.
fn number(name: &str) -> Option<u64> {
    env::var(name).ok()?.parse().ok()
}
