//! Which driver and devices there are.

use penstock_cuda::{Driver, Error, Library};
use serde::Serialize;

/// A driver, found or not, and usable or not.
#[derive(Clone, Debug, Serialize)]
pub struct Found {
    /// Where it is looked for: a path, or a name that the loader knows.
    pub path: String,
    /// Whether there is one.
    pub is_found: bool,
    /// The version of CUDA that it is made for, where it is found.
    pub version: Option<String>,
    /// Why it cannot be used, where it cannot.
    pub problem: Option<String>,
    /// How many devices it has.
    pub device_count: u32,
    /// Those of them that were looked at.
    pub devices: Vec<DeviceFound>,
}

/// One device, usable or not.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceFound {
    /// Its number in this process.
    pub ordinal: u32,
    /// What its maker calls it.
    pub name: String,
    /// Where on the bus it is, in lower case.
    pub pci_bus_id: String,
    /// Memory that is free.
    pub free_bytes: usize,
    /// All of its memory.
    pub total_bytes: usize,
    /// Why it cannot be used, where it cannot; nothing else is known then.
    pub problem: Option<String>,
}

impl Found {
    /// Looks for the driver that this process shares, and at one of its devices, or all. Whoever is looked
    /// at makes a context, which takes its time and some of its memory.
    pub fn look(only: Option<u32>) -> Found {
        let path = Driver::path();
        let mut found = Found {
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

fn describe(driver: &Driver, ordinal: u32) -> DeviceFound {
    look_at(driver, ordinal).unwrap_or_else(|error| DeviceFound {
        ordinal,
        name: String::new(),
        pci_bus_id: String::new(),
        free_bytes: 0,
        total_bytes: 0,
        problem: Some(error.to_string()),
    })
}

fn look_at(driver: &Driver, ordinal: u32) -> Result<DeviceFound, Error> {
    let device = driver.device(ordinal)?;
    let (free_bytes, total_bytes) = device.memory_bytes()?;
    Ok(DeviceFound {
        ordinal,
        name: device.name()?,
        pci_bus_id: device.pci_bus_id()?.to_lowercase(),
        free_bytes,
        total_bytes,
        problem: None,
    })
}
