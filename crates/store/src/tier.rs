//! Where checkpoints are kept: which file system a path is of.
//!
//! All above finds, reads and changes the files of a checkpoint through what is told here.

use std::path::Path;
use std::sync::Arc;

use penstock_io::file_system::{FileSystem, Native};
#[cfg(feature = "objects")]
use penstock_object::{Objects, buckets};

use crate::error::Result;

/// The file system that a path is of: that of this machine, or a bucket where it is a URL.
///
/// # Errors
/// [`Error::Storage`](crate::Error::Storage) for a URL of a bucket that cannot be reached as it is asked
/// for. Nothing is asked of the bucket here.
pub fn file_system(path: &Path) -> Result<Arc<dyn FileSystem>> {
    #[cfg(feature = "objects")]
    if let Some(objects) = objects(path)? {
        return Ok(objects);
    }
    // What a build without buckets is asked for is a path like any other.
    let _ = path;
    Ok(Arc::new(Native))
}

/// The bucket that a path is in, where it is a URL.
#[cfg(feature = "objects")]
pub(crate) fn objects(path: &Path) -> Result<Option<Arc<Objects>>> {
    buckets::at(path).map_err(crate::Error::storage("reach", path))
}
