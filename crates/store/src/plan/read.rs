//! The read plan: which bytes to read for the requested tensors, and where each is put.
//!
//! Adjacent tensors share a *segment* of new memory that mirrors their bytes in the file from page
//! to page, so that direct reads go to the final memory whatever a tensor's offset is. Reads are
//! rounded to digest chunks; the files are cut into *items* of at most one extent, each read and
//! verified separately.

mod items;

use std::ops::Range;

use crate::format::shard::PAGE_BYTES;
pub(crate) use items::floor;
use items::{Area, cut_items};
pub use items::{Destination, FileFacts, FileRange, Goal, Item, Owner, Request};

/// Adjacent tensors share memory up to this size. A tensor that outlives the others keeps at most
/// this much additional memory alive.
const SEGMENT_BYTES_MAX: u64 = 4 << 20;
/// Approximate limit on the segments of a load: as segments are freed one by one, the ones in
/// between become separate mappings, and a process may have 65,530 (`vm.max_map_count`). Beyond it
/// segments grow.
const SEGMENTS_MAX: u64 = 16_384;

/// The destination of a request's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In new memory.
    Segment {
        /// Index of the segment.
        segment: usize,
        /// First byte within its memory.
        offset: u64,
    },
    /// In the caller's memory.
    Target,
    /// None: the tensor has no bytes.
    Empty,
}

/// New memory that mirrors a run of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the file.
    pub file: usize,
    /// The mirrored run, from page to page.
    pub mirror: Range<u64>,
}

/// Everything that a load reads.
#[derive(Debug)]
pub struct ReadPlan {
    /// New memory to allocate.
    pub segments: Vec<Segment>,
    /// The destination of each request's bytes, in the order of the requests.
    pub placements: Vec<Placement>,
    /// The reads, by file and offset.
    pub items: Vec<Item>,
}

/// Plans the reads for `requests`; with `cover_all`, every other byte of the files is read and
/// verified too. Requests must be inside their files and must not overlap.
pub fn plan(
    files: &[FileFacts],
    requests: &[Request],
    cover_all: bool,
    extent_bytes: u64,
) -> ReadPlan {
    let mut placements = vec![Placement::Empty; requests.len()];
    let mut segments: Vec<Segment> = Vec::new();
    let mut areas: Vec<Area> = Vec::new();
    let asked_bytes: u64 = requests.iter().map(|r| r.range.end - r.range.start).sum();
    let segment_bytes_max = SEGMENT_BYTES_MAX.max(asked_bytes / SEGMENTS_MAX);
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_unstable_by_key(|&index| (requests[index].file, requests[index].range.start));
    for index in order {
        let request = &requests[index];
        if request.range.is_empty() {
            continue;
        }
        if request.goal != Goal::Fresh {
            placements[index] = Placement::Target;
            let owner = Owner::Target(index);
            areas.push(Area {
                file: request.file,
                range: request.range.clone(),
                owner,
            });
            continue;
        }
        match areas.last_mut() {
            Some(area) if joins(area, request, segment_bytes_max) => {
                area.range.end = request.range.end;
            }
            _ => {
                let owner = Owner::Segment(segments.len());
                let file = request.file;
                segments.push(Segment { file, mirror: 0..0 });
                areas.push(Area {
                    file,
                    range: request.range.clone(),
                    owner,
                });
            }
        }
        let area = &areas[areas.len() - 1];
        let mirror_start = floor(area.range.start, PAGE_BYTES);
        segments[area.segment()].mirror = mirror_start..area.range.end.next_multiple_of(PAGE_BYTES);
        placements[index] = Placement::Segment {
            segment: area.segment(),
            offset: request.range.start - mirror_start,
        };
    }
    let items = cut_items(files, requests, &areas, cover_all, extent_bytes);
    ReadPlan {
        segments,
        placements,
        items,
    }
}

/// Whether a request continues a segment: adjacent to it, and small enough together.
fn joins(area: &Area, request: &Request, segment_bytes_max: u64) -> bool {
    matches!(area.owner, Owner::Segment(_))
        && area.file == request.file
        && request.range.start - area.range.end <= PAGE_BYTES
        && request.range.end - area.range.start <= segment_bytes_max
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::digest::CHUNK_BYTES;
    use proptest::prelude::*;

    const EXTENT_BYTES: u64 = 4 << 20;
    const DIRECT: FileFacts = FileFacts {
        bytes: 0,
        offset_alignment: PAGE_BYTES,
        memory_alignment: 512,
        is_elsewhere: false,
        is_sealed: false,
    };

    fn facts(bytes: u64) -> FileFacts {
        FileFacts { bytes, ..DIRECT }
    }

    fn request(range: Range<u64>) -> Request {
        Request {
            file: 0,
            range,
            goal: Goal::Fresh,
        }
    }

    #[test]
    fn a_small_tensor_costs_one_chunk() {
        let plan = plan(
            &[facts(100 << 20)],
            &[request(5_000_000..5_000_100)],
            false,
            EXTENT_BYTES,
        );
        assert_eq!(plan.items.len(), 1);
        assert_eq!(plan.items[0].range, 4 << 20..5 << 20);
        let kinds: Vec<_> = plan.items[0].pieces.iter().map(|piece| piece.to).collect();
        let copy = Destination::Copy(Owner::Segment(0));
        assert_eq!(kinds, [Destination::Discard, copy, Destination::Discard]);
    }

    #[test]
    fn a_large_aligned_tensor_is_read_in_place() {
        let plan = plan(
            &[facts(64 << 20)],
            &[request(4096..48 << 20)],
            false,
            EXTENT_BYTES,
        );
        for item in &plan.items {
            let copies = item
                .pieces
                .iter()
                .any(|piece| matches!(piece.to, Destination::Copy(_)));
            assert!(!copies, "{item:?}");
        }
        assert_eq!(
            plan.placements,
            [Placement::Segment {
                segment: 0,
                offset: 0
            }]
        );
        assert_eq!(plan.segments[0].mirror, 4096..48 << 20);
    }

    #[test]
    fn targets_are_read_in_place_where_their_address_allows() {
        let target = |address| Request {
            file: 0,
            range: 4096..(1 << 20) + 4096,
            goal: Goal::Plain(address),
        };
        let direct_bytes = |address| {
            let plan = plan(&[facts(2 << 20)], &[target(address)], false, EXTENT_BYTES);
            let pieces = plan.items.into_iter().flat_map(|item| item.pieces);
            pieces
                .filter(|piece| matches!(piece.to, Destination::Direct(_)))
                .map(|piece| piece.range.end - piece.range.start)
                .sum::<u64>()
        };
        assert_eq!(direct_bytes(0x10000), 1 << 20);
        assert_eq!(direct_bytes(0x10000 + 512), 1 << 20);
        assert_eq!(direct_bytes(0x10000 + 64), 0);
    }

    #[test]
    fn what_is_elsewhere_is_read_with_one_request_an_item() {
        let file = FileFacts {
            offset_alignment: 1,
            memory_alignment: 1,
            is_elsewhere: true,
            ..facts(40 << 20)
        };
        let requests = [
            request(4096..3 << 20),
            request(3 << 20..(3 << 20) + 100),
            request(4 << 20..40 << 20),
        ];
        let plan = plan(&[file], &requests, true, 8 << 20);
        assert_eq!(plan.items.len(), 5);
        for item in &plan.items {
            let is_read_alone = |piece: &FileRange| matches!(piece.to, Destination::Direct(_));
            let alone = item.pieces.iter().filter(|piece| is_read_alone(piece));
            // No piece, or the only one.
            let is_one_request = alone.count() == 0 || item.pieces.len() == 1;
            assert!(is_one_request, "{item:?}");
        }
        assert!(plan.items[1..].iter().all(|item| item.pieces.len() == 1));
    }

    proptest! {
        #[test]
        fn every_requested_byte_has_one_place(
            lengths in prop::collection::vec((0u64..3 << 20, 0u64..200_000, 0..3), 1..12),
            cover_all in any::<bool>(),
            way in 0..4,
        ) {
            let mut at = 4096;
            let mut requests = Vec::new();
            for (bytes, gap, target) in lengths {
                let goal = match target {
                    0 => Goal::Fresh,
                    1 => Goal::Plain(0x7000_0000 + at as usize),
                    _ => Goal::Scattered,
                };
                requests.push(Request { file: 0, range: at..at + bytes, goal });
                at += bytes + gap;
            }
            let mut file = facts(at + 777);
            if way > 0 {
                let is_elsewhere = way == 2;
                file = FileFacts { offset_alignment: 1, memory_alignment: 1, is_elsewhere, ..file };
            }
            file.is_sealed = way == 3;
            let plan = plan(&[file], &requests, cover_all, EXTENT_BYTES);
            let mut landed = vec![0; requests.len()];
            let mut end = 0;
            for item in &plan.items {
                prop_assert!(item.range.start >= end && item.range.end <= file.bytes);
                prop_assert_eq!(item.range.start % CHUNK_BYTES, 0);
                prop_assert!(!cover_all || item.range.start == end);
                prop_assert!(item.range.end - item.range.start <= EXTENT_BYTES);
                end = item.range.end;
                let mut at = item.range.start;
                let mut staged = 0;
                let is_direct = |piece: &FileRange| matches!(piece.to, Destination::Direct(_));
                if file.is_sealed && item.pieces.iter().any(is_direct) {
                    prop_assert_eq!(item.pieces.len(), 1);
                    let to = item.pieces[0].to;
                    prop_assert!(matches!(to, Destination::Direct(Owner::Segment(_))));
                }
                for piece in &item.pieces {
                    prop_assert_eq!(piece.range.start, at);
                    prop_assert!(piece.range.end > at);
                    at = piece.range.end;
                    let owner = match piece.to {
                        Destination::Discard => { staged += at - piece.range.start; continue }
                        Destination::Copy(owner) => { staged += at - piece.range.start; owner }
                        Destination::Direct(owner) => { staged += 2 * PAGE_BYTES; owner }
                    };
                    match owner {
                        Owner::Target(index) => landed[index] += at - piece.range.start,
                        Owner::Segment(segment) => {
                            let mirror = &plan.segments[segment].mirror;
                            prop_assert!(mirror.start <= piece.range.start && at <= mirror.end);
                            for (index, request) in requests.iter().enumerate() {
                                let inside = matches!(plan.placements[index],
                                    Placement::Segment { segment: s, .. } if s == segment);
                                let overlap = at.min(request.range.end)
                                    .saturating_sub(piece.range.start.max(request.range.start));
                                landed[index] += if inside { overlap } else { 0 };
                            }
                        }
                    }
                }
                prop_assert_eq!(at, item.range.end);
                prop_assert!(staged <= EXTENT_BYTES + 2 * PAGE_BYTES);
            }
            for (request, landed) in requests.iter().zip(landed) {
                prop_assert_eq!(landed, request.range.end - request.range.start);
            }
            if cover_all {
                prop_assert_eq!(end, file.bytes);
            }
        }
    }
}
