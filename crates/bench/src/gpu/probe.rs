//! Finds the driver and its devices.

use penstock_cuda::{Driver, Error, Library};
use serde::Serialize;

/// A driver: whether it was found, and whether it is usable.
#[derive(Clone, Debug, Serialize)]
pub struct DriverProbe {
    /// The path or library name that the loader tries.
    pub path: String,
    /// Whether the library was found.
    pub is_found: bool,
    /// The CUDA version that the driver supports, if it was found.
    pub version: Option<String>,
    /// Why the driver is unusable, if it is.
    pub problem: Option<String>,
    /// Number of devices.
    pub device_count: u32,
    /// The devices that were examined.
    pub devices: Vec<DeviceProbe>,
}

/// A device, usable or not.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceProbe {
    /// Its number in this process.
    pub ordinal: u32,
    /// Its product name.
    pub name: String,
    /// Its PCI bus address, in lower case.
    pub pci_bus_id: String,
    /// Free memory in bytes.
    pub free_bytes: usize,
    /// Total memory in bytes.
    pub total_bytes: usize,
    /// Why the device is unusable, if it is; only its number is then known.
    pub problem: Option<String>,
}

impl DriverProbe {
    /// Finds the driver that this process shares, and examines one of its devices, or all. Each
    /// examined device gets a context, which takes time and some of its memory.
    pub fn run(only: Option<u32>) -> DriverProbe {
        let path = Driver::path();
        let mut found = DriverProbe {
            path: path.display().to_string(),
            is_found: false,
            version: None,
            problem: None,
            device_count: 0,
            devices: Vec::new(),
        };
        match Library::load(&path) {
            Ok(library) => {
                found.is_found = true;
                found.version = Some(library.version().to_string());
            }
            Err(error) => {
                found.problem = Some(error.to_string());
                return found;
            }
        }
        match Driver::shared() {
            Ok(driver) => {
                found.device_count = driver.devices();
                let all = 0..found.device_count;
                let looked_at = all.filter(|&ordinal| only.is_none_or(|only| only == ordinal));
                found.devices = looked_at.map(|ordinal| describe(driver, ordinal)).collect();
            }
            Err(error) => found.problem = Some(error.to_string()),
        }
        found
    }
}

fn describe(driver: &Driver, ordinal: u32) -> DeviceProbe {
    probe_device(driver, ordinal).unwrap_or_else(|error| DeviceProbe {
        ordinal,
        name: String::new(),
        pci_bus_id: String::new(),
        free_bytes: 0,
        total_bytes: 0,
        problem: Some(error.to_string()),
    })
}

fn probe_device(driver: &Driver, ordinal: u32) -> Result<DeviceProbe, Error> {
    let device = driver.device(ordinal)?;
    let (free_bytes, total_bytes) = device.memory_bytes()?;
    Ok(DeviceProbe {
        ordinal,
        name: device.name()?,
        pci_bus_id: device.pci_bus_id()?.to_lowercase(),
        free_bytes,
        total_bytes,
        problem: None,
    })
}
