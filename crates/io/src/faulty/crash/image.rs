//! The content of a disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A tree of directories and files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Image {
    /// The entry at each path, relative to the root of the log.
    pub entries: BTreeMap<PathBuf, Entry>,
}

/// A directory or a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entry {
    /// A directory.
    Directory,
    /// A file with its bytes.
    File(Arc<[u8]>),
}

impl Image {
    /// Makes the directory at `root` hold this image and nothing else, changing only the
    /// differences to `before`, its present content.
    pub fn materialise(&self, root: &Path, before: &Image) -> std::io::Result<()> {
        for (path, entry) in before.entries.iter().rev() {
            match (entry, self.entries.get(path)) {
                (Entry::Directory, Some(Entry::Directory)) => {}
                (Entry::File(_), Some(Entry::File(_))) => {}
                (Entry::Directory, _) => std::fs::remove_dir(root.join(path))?,
                (Entry::File(_), _) => std::fs::remove_file(root.join(path))?,
            }
        }
        for (path, entry) in &self.entries {
            let old = before.entries.get(path);
            match entry {
                Entry::Directory if old != Some(entry) => std::fs::create_dir(root.join(path))?,
                Entry::File(bytes) if old != Some(entry) => {
                    std::fs::write(root.join(path), bytes)?;
                }
                _ => {}
            }
        }
        Ok(())
    }
}
