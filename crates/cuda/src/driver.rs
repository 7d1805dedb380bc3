//! Finds a driver and initialises it.

use std::env;
use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::raw;
use crate::table::Table;
use crate::version::Version;

/// The environment variable for a driver other than the system's.
pub const DRIVER_VARIABLE: &str = "PENSTOCK_CUDA_DRIVER";

/// The system's driver, by its name for the loader.
const DEFAULT: &str = "libcuda.so.1";

/// The first version that retains primary contexts, and exchanges capture modes, by the functions
/// that this crate calls.
const OLDEST: Version = Version::new(11, 0);

/// A driver that was found, whether or not it is usable.
pub struct Library {
    table: Table,
    version: Version,
}

impl Library {
    /// Loads a driver.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Incomplete`].
    #[expect(unsafe_code, reason = "a function of the driver")]
    pub fn load(path: &Path) -> Result<Library> {
        let table = Table::load(path)?;
        let mut version: c_int = 0;
        // SAFETY: it writes one number, and may be called before all other functions.
        unsafe { table.driver_version(&raw mut version) }?;
        Ok(Library {
            table,
            version: Version::of(version.unsigned_abs()),
        })
    }

    /// The CUDA version of the driver.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Initialises the driver.
    ///
    /// # Errors
    /// [`Error::TooOld`], [`Error::NoDevice`], and the driver's error.
    #[expect(unsafe_code, reason = "functions of the driver")]
    pub fn begin(self) -> Result<Driver> {
        let Library { table, version } = self;
        if version < OLDEST {
            return Err(Error::TooOld {
                found: version,
                needed: OLDEST,
            });
        }
        let no_device = |error: Error| match error.code() {
            Some(raw::NO_DEVICE) => Error::NoDevice,
            _ => error,
        };
        // SAFETY: zero is the only valid flag.
        unsafe { table.init(0) }.map_err(no_device)?;
        let mut count: c_int = 0;
        // SAFETY: it writes one number.
        unsafe { table.device_count(&raw mut count) }?;
        if count == 0 {
            return Err(Error::NoDevice);
        }
        let devices = (0..count).map(|_| Mutex::default()).collect();
        Ok(Driver {
            table: Arc::new(table),
            version,
            devices,
            process: std::process::id(),
        })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library")
            .field("path", &self.table.path())
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

/// An initialised driver.
pub struct Driver {
    table: Arc<Table>,
    version: Version,
    /// The devices in use, by number.
    devices: Vec<Mutex<Weak<Device>>>,
    /// The process that initialised it: a fork must not use it.
    process: u32,
}

impl Driver {
    /// Loads and initialises a driver.
    pub fn open(path: &Path) -> Result<Driver> {
        Library::load(path)?.begin()
    }

    /// The driver of this process: the one in [`DRIVER_VARIABLE`], or the system's. It is loaded
    /// once.
    pub fn shared() -> Result<&'static Driver> {
        static SHARED: OnceLock<Result<Driver>> = OnceLock::new();
        let shared = SHARED.get_or_init(|| Driver::open(&Driver::path()));
        shared.as_ref().map_err(Clone::clone)
    }

    /// The path of that driver, or its name for the loader.
    pub fn path() -> PathBuf {
        let given = env::var_os(DRIVER_VARIABLE).filter(|given| !given.is_empty());
        given.map_or_else(|| PathBuf::from(DEFAULT), PathBuf::from)
    }

    /// The CUDA version of the driver.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The number of devices.
    pub fn devices(&self) -> u32 {
        self.devices.len() as u32
    }

    /// A device, by CUDA's number of it in this process. Its primary context is retained as long as
    /// the device is in use.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`], [`Error::Unusable`], [`Error::Forked`], and the driver's error.
    pub fn device(&self, ordinal: u32) -> Result<Arc<Device>> {
        let Some(slot) = self.devices.get(ordinal as usize) else {
            return Err(Error::NoSuchDevice {
                ordinal,
                count: self.devices(),
            });
        };
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = slot.upgrade() {
            return Ok(device);
        }
        let device = Arc::new(Device::open(&self.table, self.process, ordinal)?);
        *slot = Arc::downgrade(&device);
        Ok(device)
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("path", &self.table.path())
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}
