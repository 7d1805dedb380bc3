//! Where checkpoints are kept: which file system a path is of.
//!
//! All above finds, reads and changes the files of a checkpoint through what is told here.

use std::path::Path;
use std::sync::Arc;

use penstock_io::file_system::{FileSystem, Native};

/// The file system that a path is of.
pub fn file_system(_path: &Path) -> Arc<dyn FileSystem> {
    Arc::new(Native)
}
