//! The mappings of this process, as the kernel lists them.

use std::fs;
use std::ops::Range;

use super::unwatchable::{Unwatchable, refused};

/// One mapping of this process.
#[derive(Debug, PartialEq)]
pub(super) struct Mapping {
    pub(super) range: Range<usize>,
    pub(super) kind: MappingKind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MappingKind {
    /// No other process reaches it.
    Anonymous,
    Shared,
    File,
}

/// Reads the mappings, in the order of addresses.
pub(super) fn mappings() -> Result<Vec<Mapping>, Unwatchable> {
    let maps = fs::read("/proc/self/maps").map_err(refused("/proc/self/maps"))?;
    let maps = String::from_utf8_lossy(&maps);
    Ok(maps.lines().filter_map(mapping).collect())
}

/// Parses a line such as `7f00-7f10 rw-s 00000000 00:01 1024 /dev/zero (deleted)`.
fn mapping(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text: &str| usize::from_str_radix(text, 16).ok();
    let range = address(start)?..address(end)?;
    let is_shared = words.next()?.ends_with('s');
    // A mapping with an inode has a file behind it; without a file, device and inode numbers are
    // zero.
    let has_file = words
        .skip(1)
        .take(2)
        .any(|word| !matches!(word, "00:00" | "0"));
    let kind = match (is_shared, has_file) {
        (true, _) => MappingKind::Shared,
        (false, true) => MappingKind::File,
        (false, false) => MappingKind::Anonymous,
    };
    Some(Mapping { range, kind })
}

/// The mappings that overlap a range of addresses.
pub(super) fn within<'a>(
    mappings: &'a [Mapping],
    span: &Range<usize>,
) -> impl Iterator<Item = &'a Mapping> {
    let first = mappings.partition_point(|mapping| mapping.range.end <= span.start);
    let end = span.end;
    mappings[first..]
        .iter()
        .take_while(move |mapping| mapping.range.start < end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_what_their_line_says() {
        for (line, kind) in [
            (
                "rw-s 00000000 00:01 1024 /dev/zero (deleted)",
                MappingKind::Shared,
            ),
            ("rw-p 00000000 fe:00 1024   /a file", MappingKind::File),
            ("rw-p 00000000 00:00 0", MappingKind::Anonymous),
            ("rw-p 00000000 00:00 0      [heap]", MappingKind::Anonymous),
        ] {
            let range = 0x7f00_a000..0x7f00_b000;
            let found = mapping(&format!("7f00a000-7f00b000 {line}"));
            assert_eq!(found, Some(Mapping { range, kind }));
        }
        assert_eq!(mapping(""), None);
    }
}
