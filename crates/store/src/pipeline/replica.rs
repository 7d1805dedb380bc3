//! The replica: another copy of a checkpoint, from which damaged chunks are read.
//!
//! Only chunks that match their digests are taken, so it does not matter which checkpoint the
//! replica holds.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use crate::format::digest::Digest;
use crate::report::{FallbackKind, Run};
use crate::tier;

/// The original bytes of a chunk of a file, if the replica at `path` has them.
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

/// Reports which chunks were read from the replica: the offsets of the chunks per file.
pub(super) fn report(path: &Path, mended: &BTreeMap<&Path, Vec<u64>>, run: &mut Run) {
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
