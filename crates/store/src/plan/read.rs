//! The read plan: which bytes to fetch for the tensors asked for, and where each lands.
//!
//! Neighbouring tensors share a *segment* of fresh memory that mirrors their bytes in the file from
//! page to page, so that direct reads land in the final place whatever a tensor's offset is. What
//! is read is rounded to digest chunks; the files are cut into *items* of at most one extent, each
//! read and verified on its own.
//!
//! A piece that is too small for a request of its own, or that goes to a caller's memory which the
//! device cannot reach directly, is read into staging together with what surrounds it and copied.

use std::ops::Range;

use crate::format::digest::CHUNK_BYTES;
use crate::format::shard::PAGE_BYTES;

/// Tensors that lie side by side share memory up to this size. A tensor that outlives the others
/// keeps at most this much beside itself alive.
const SEGMENT_BYTES_MAX: u64 = 4 << 20;
/// About how many segments a load has at most: as they are given back one by one, what is left in
/// between becomes mappings of its own, and a process may have 65,530 (`vm.max_map_count`). Beyond
/// it segments grow.
const SEGMENTS_MAX: u64 = 16_384;
/// Pieces smaller than this are not worth a request of their own next to others.
const DIRECT_BYTES_MIN: u64 = 64 << 10;

/// What the plan needs to know of a file.
#[derive(Clone, Copy, Debug)]
pub struct FileFacts {
    /// Exact size.
    pub bytes: u64,
    /// Alignment of offsets and lengths: [`PAGE_BYTES`] for direct I/O, 1 through the page cache.
    pub offset_alignment: u64,
    /// Alignment of memory addresses.
    pub memory_alignment: usize,
}

/// One tensor that is asked for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Index of its file.
    pub file: usize,
    /// Its bytes in the file.
    pub range: Range<u64>,
    /// Whose memory is to hold them.
    pub goal: Goal,
}

/// Where the bytes of a request are to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Into fresh memory.
    Fresh,
    /// Into the caller's memory at this address.
    Plain(usize),
    /// Into places of the caller's memory that lie apart; always through staging.
    Scattered,
}

/// Where the bytes of a request will be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In fresh memory.
    Segment {
        /// Index of the segment.
        segment: usize,
        /// First byte within its memory.
        offset: u64,
    },
    /// In the caller's memory.
    Target,
    /// Nowhere: the tensor has no bytes.
    Empty,
}

/// Fresh memory that mirrors a run of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the file.
    pub file: usize,
    /// The run that is mirrored, from page to page.
    pub mirror: Range<u64>,
}

/// Whose memory a piece lands in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The segment with this index.
    Segment(usize),
    /// The caller's memory of the request with this index.
    Target(usize),
}

/// Where the bytes of a piece go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Read for its digest only.
    Discard,
    /// Read into staging, verified, then copied.
    Copy(Owner),
    /// Read in place.
    Direct(Owner),
}

/// A run of an item with one destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Bytes of the file.
    pub range: Range<u64>,
    /// Where they go.
    pub to: Destination,
}

/// A run of one file that is read and verified as a unit: whole chunks, at most one extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index of the file.
    pub file: usize,
    /// Bytes of the file.
    pub range: Range<u64>,
    /// What it is made of, in order and without gaps.
    pub pieces: Vec<Piece>,
}

/// Everything that a load reads.
#[derive(Debug)]
pub struct ReadPlan {
    /// Fresh memory to allocate.
    pub segments: Vec<Segment>,
    /// Where each request's bytes will be, in the order of the requests.
    pub placements: Vec<Placement>,
    /// What to read, by file and offset.
    pub items: Vec<Item>,
}

/// A run of a file that somebody asked for: one segment or one target.
struct Area {
    file: usize,
    range: Range<u64>,
    owner: Owner,
}

/// Plans how to fetch `requests`; with `cover_all` every other byte of the files is read and
/// verified too. Requests have to lie inside their files and must not overlap.
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

impl Area {
    fn segment(&self) -> usize {
        match self.owner {
            Owner::Segment(index) => index,
            Owner::Target(_) => unreachable!("a target is never extended"),
        }
    }
}

/// Whether a request continues a segment: next to it, and small enough together.
fn joins(area: &Area, request: &Request, segment_bytes_max: u64) -> bool {
    matches!(area.owner, Owner::Segment(_))
        && area.file == request.file
        && request.range.start - area.range.end <= PAGE_BYTES
        && request.range.end - area.range.start <= segment_bytes_max
}

fn cut_items(
    files: &[FileFacts],
    requests: &[Request],
    areas: &[Area],
    cover_all: bool,
    extent_bytes: u64,
) -> Vec<Item> {
    let mut items = Vec::new();
    let mut rest = areas;
    for (file, facts) in files.iter().enumerate() {
        let (mine, others) = rest.split_at(rest.partition_point(|area| area.file <= file));
        rest = others;
        let runs = if cover_all {
            whole(facts.bytes)
        } else {
            chunk_runs(mine, facts.bytes)
        };
        let mut first = 0;
        for run in runs {
            let mut start = run.start;
            while start < run.end {
                let end = (floor(start, extent_bytes) + extent_bytes).min(run.end);
                while first < mine.len() && mine[first].range.end <= start {
                    first += 1;
                }
                let pieces = cut_pieces(facts, requests, &mine[first..], start..end);
                items.push(Item {
                    file,
                    range: start..end,
                    pieces,
                });
                start = end;
            }
        }
    }
    items
}

fn whole(bytes: u64) -> Vec<Range<u64>> {
    let run = 0..bytes;
    if run.is_empty() {
        Vec::new()
    } else {
        vec![run]
    }
}

/// The chunks that hold the areas, neighbouring ones merged.
fn chunk_runs(areas: &[Area], file_bytes: u64) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for area in areas {
        let start = floor(area.range.start, CHUNK_BYTES);
        let end = area.range.end.next_multiple_of(CHUNK_BYTES).min(file_bytes);
        match runs.last_mut() {
            Some(run) if start <= run.end => run.end = run.end.max(end),
            _ => runs.push(start..end),
        }
    }
    runs
}

fn cut_pieces(
    facts: &FileFacts,
    requests: &[Request],
    areas: &[Area],
    item: Range<u64>,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut push = |range: Range<u64>, to: Destination| {
        if !range.is_empty() {
            pieces.push(Piece { range, to });
        }
    };
    let mut at = item.start;
    for area in areas.iter().take_while(|area| area.range.start < item.end) {
        let part = area.range.start.max(item.start)..area.range.end.min(item.end);
        push(at..part.start, Destination::Discard);
        at = part.end;
        let direct = direct_range(facts, requests, area, &part, &item);
        push(part.start..direct.start, Destination::Copy(area.owner));
        push(direct.clone(), Destination::Direct(area.owner));
        push(direct.end..part.end, Destination::Copy(area.owner));
    }
    push(at..item.end, Destination::Discard);
    pieces
}

/// The run of `part` that can be read in place; empty at the end of `part` where none can.
fn direct_range(
    facts: &FileFacts,
    requests: &[Request],
    area: &Area,
    part: &Range<u64>,
    item: &Range<u64>,
) -> Range<u64> {
    let none = part.end..part.end;
    let range = match area.owner {
        // A segment has room for the pages around the part.
        Owner::Segment(_) => part.clone(),
        // The caller's memory ends where it ends.
        Owner::Target(index) => {
            let start = part.start.next_multiple_of(facts.offset_alignment);
            let end = floor(part.end, facts.offset_alignment);
            let Goal::Plain(address) = requests[index].goal else {
                return none;
            };
            let first = address.wrapping_add((start - area.range.start) as usize);
            if start >= end || !first.is_multiple_of(facts.memory_alignment) {
                return none;
            }
            start..end
        }
    };
    if is_worth_a_request(&range, item) {
        range
    } else {
        none
    }
}

/// Whether a piece is read on its own. Small ones are where that costs no more than staging them:
/// at most two of an item, those that touch its ends on whole pages.
fn is_worth_a_request(range: &Range<u64>, item: &Range<u64>) -> bool {
    let touches_an_end = range.start == item.start || range.end == item.end;
    let is_on_pages = range.start.is_multiple_of(PAGE_BYTES)
        && (range.end.is_multiple_of(PAGE_BYTES) || range.end == item.end);
    range.end - range.start >= DIRECT_BYTES_MIN || (touches_an_end && is_on_pages)
}

pub(crate) fn floor(value: u64, alignment: u64) -> u64 {
    value - value % alignment
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EXTENT_BYTES: u64 = 4 << 20;
    const DIRECT: FileFacts = FileFacts {
        bytes: 0,
        offset_alignment: PAGE_BYTES,
        memory_alignment: 512,
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

    proptest! {
        #[test]
        fn every_requested_byte_has_one_place(
            lengths in prop::collection::vec((0u64..3 << 20, 0u64..200_000, 0..3), 1..12),
            cover_all in any::<bool>(),
            buffered in any::<bool>(),
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
            if buffered {
                file = FileFacts { offset_alignment: 1, memory_alignment: 1, ..file };
            }
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
