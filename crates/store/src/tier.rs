//! Storage tiers: the file system for a path.
//!
//! All modules above read and change the files of a checkpoint through the file system returned
//! here.

use std::path::Path;
use std::sync::Arc;

use penstock_io::file_system::{FileSystem, Native};
#[cfg(feature = "objects")]
use penstock_object::{Objects, buckets};

use crate::error::Result;

/// The file system of a path: the local one, or a bucket if the path is a URL.
///
/// # Errors
/// [`Error::Storage`](crate::Error::Storage) for a bucket's URL with settings that cannot work. No
/// request is sent.
pub fn file_system(path: &Path) -> Result<Arc<dyn FileSystem>> {
    #[cfg(feature = "objects")]
    if let Some(objects) = objects(path)? {
        return Ok(objects);
    }
    // A build without buckets treats every path as local.
    let _ = path;
    Ok(Arc::new(Native))
}

/// The bucket that contains a path, if the path is a URL.
#[cfg(feature = "objects")]
pub(crate) fn objects(path: &Path) -> Result<Option<Arc<Objects>>> {
    buckets::at(path).map_err(crate::Error::storage("reach", path))
}
