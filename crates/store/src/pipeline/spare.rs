//! Another copy of a checkpoint, where chunks are read that are damaged.
//!
//! Only what matches its digest is taken from there, so it does not matter what that copy is of.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use crate::format::digest::Digest;
use crate::report::{FallbackKind, Run};
use crate::tier;

/// The bytes of a chunk of a file as they were written, if the copy at `path` has them.
pub(super) fn chunk(
    path: &Path,
    file: &Path,
    range: &Range<u64>,
    digest: Digest,
) -> Option<Vec<u8>> {
    let file = path.join(file.file_name()?);
    let file_system = tier::file_system(path).ok()?;
    let bytes = file_system.files().read_range(&file, range.clone()).ok()?;
    (Digest::of(&bytes) == digest && bytes.len() as u64 == range.end - range.start).then_some(bytes)
}

/// Says what was read there: of each file, where its chunks begin.
pub(super) fn tell(path: &Path, mended: &BTreeMap<&Path, Vec<u64>>, run: &mut Run) {
    for (file, offsets) in mended {
        let first = offsets.iter().min().copied().unwrap_or_default();
        let chunks = match offsets.len() {
            1 => "a chunk is damaged and was".to_owned(),
            several => format!("{several} chunks are damaged and were"),
        };
        let (file, path) = (file.display(), path.display());
        let reason = format!("{file}, offset {first}: {chunks} read from {path}");
        run.note(FallbackKind::Copy, reason);
    }
}
