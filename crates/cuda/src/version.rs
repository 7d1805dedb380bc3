//! Versions of CUDA.

use std::fmt;

/// The CUDA version of a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u32);

impl Version {
    /// A version in the driver's format: major version times 1000, plus minor version times 10.
    pub(crate) const fn of(number: u32) -> Version {
        Version(number)
    }

    /// A version by its two numbers.
    pub const fn new(major: u32, minor: u32) -> Version {
        Version(major * 1000 + minor * 10)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}
