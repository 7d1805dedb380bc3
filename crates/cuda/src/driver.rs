//! A driver: found, and usable.

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

/// The environment variable that names a driver in place of the system's.
pub const DRIVER_VARIABLE: &str = "PENSTOCK_CUDA_DRIVER";

/// By which the loader knows the system's.
const DEFAULT: &str = "libcuda.so.1";

/// Primary contexts are retained and released, and captures exchanged, in the way of 11.0 on.
const OLDEST: Version = Version::new(11, 0);

/// A driver that is found, whether or not it can be used.
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
        // SAFETY: it writes one number, and may be called before all others.
        unsafe { table.driver_version(&raw mut version) }?;
        Ok(Library {
            table,
            version: Version::of(version.unsigned_abs()),
        })
    }

    /// The version of CUDA that it is made for.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Begins to use it.
    ///
    /// # Errors
    /// [`Error::TooOld`], [`Error::NoDevice`], and what the driver says.
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
        // SAFETY: the one flag that there is.
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

/// A driver that can be used.
pub struct Driver {
    table: Arc<Table>,
    version: Version,
    /// Those that somebody has.
    devices: Vec<Mutex<Weak<Device>>>,
    /// Who uses it: a fork must not.
    process: u32,
}

impl Driver {
    /// Loads a driver and begins to use it.
    ///
    /// # Errors
    /// As [`Library::load`] and [`Library::begin`].
    pub fn open(path: &Path) -> Result<Driver> {
        Library::load(path)?.begin()
    }

    /// That of this process: the one that [`DRIVER_VARIABLE`] names, or the system's. It is looked for
    /// once.
    ///
    /// # Errors
    /// As [`Driver::open`], the same each time.
    pub fn shared() -> Result<&'static Driver> {
        static SHARED: OnceLock<Result<Driver>> = OnceLock::new();
        let shared = SHARED.get_or_init(|| Driver::open(&Driver::path()));
        shared.as_ref().map_err(Clone::clone)
    }

    /// Where that one is looked for: a path, or a name that the loader knows.
    pub fn path() -> PathBuf {
        let given = env::var_os(DRIVER_VARIABLE).filter(|given| !given.is_empty());
        given.map_or_else(|| PathBuf::from(DEFAULT), PathBuf::from)
    }

    /// The version of CUDA that it is made for.
    pub fn version(&self) -> Version {
        self.version
    }

    /// How many devices it has.
    pub fn devices(&self) -> u32 {
        self.devices.len() as u32
    }

    /// One of its devices, by the number that CUDA gives it in this process. Its primary context is
    /// kept as long as somebody has the device.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`], [`Error::Unusable`], [`Error::Forked`], and what the driver says.
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
