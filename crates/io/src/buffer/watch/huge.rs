//! Huge pages under lent memory.

use std::fs::File;
use std::io;

use super::kernel::find_huge;
use super::pages::whole_pages;
use crate::buffer::HostRegion;

/// Finds out whether memory is in huge pages.
#[derive(Debug)]
pub struct HugePages {
    pagemap: File,
}

impl HugePages {
    /// Opens the kernel's list of this process's pages.
    ///
    /// # Errors
    /// The system's error.
    pub fn open() -> io::Result<HugePages> {
        let pagemap = File::open("/proc/self/pagemap")?;
        Ok(HugePages { pagemap })
    }

    /// Bytes of a region that are in huge pages: 0 where the kernel does not say (before Linux 6.7).
    pub fn bytes(&self, region: &HostRegion) -> u64 {
        let mut pages = whole_pages(&region.span());
        let mut bytes = 0;
        while let Ok(Some(huge)) = find_huge(&self.pagemap, &pages) {
            bytes += huge.len() as u64;
            pages.start = huge.end;
        }
        bytes
    }
}
