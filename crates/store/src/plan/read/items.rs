//! Items: the units of reading and verification, and the destinations of their pieces.
//!
//! A piece that is too small for a separate request, or that goes to a caller's memory which the
//! device cannot reach directly, is read into staging together with its neighbours and copied.

use std::ops::Range;

use crate::format::digest::CHUNK_BYTES;
use crate::format::shard::PAGE_BYTES;

/// Smaller pieces are not worth a separate request next to others.
const DIRECT_BYTES_MIN: u64 = 64 << 10;

/// The properties of a file that the plan needs.
#[derive(Clone, Copy, Debug)]
pub struct FileFacts {
    /// Exact size.
    pub bytes: u64,
    /// Alignment of offsets and lengths: [`PAGE_BYTES`] for direct I/O, 1 through the page cache.
    pub offset_alignment: u64,
    /// Alignment of memory addresses.
    pub memory_alignment: usize,
    /// Whether each read is a request over a network: then an item is read with one request.
    pub is_elsewhere: bool,
    /// Whether its bytes are opened after they were read. Then only whole items are read in place,
    /// into new memory: others would leave sealed bytes in the caller's.
    pub is_sealed: bool,
}

/// A requested tensor.
#[derive(Clone, Debug)]
pub struct Request {
    /// Index of its file.
    pub file: usize,
    /// The tensor's bytes in the file.
    pub range: Range<u64>,
    /// The memory that is to receive them.
    pub goal: Goal,
}

/// The destination of a request's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// New memory.
    Fresh,
    /// The caller's memory at this address.
    Plain(usize),
    /// Scattered places in the caller's memory; always through staging.
    Scattered,
}

/// The memory that receives a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The segment with this index.
    Segment(usize),
    /// The caller's memory of the request with this index.
    Target(usize),
}

/// How a piece is read.
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
pub struct FileRange {
    /// Bytes of the file.
    pub range: Range<u64>,
    /// How they are read.
    pub to: Destination,
}

/// A run of one file that is read and verified as a unit: whole chunks, at most one extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Index of the file.
    pub file: usize,
    /// Bytes of the file.
    pub range: Range<u64>,
    /// The pieces of the item, in order and without gaps.
    pub pieces: Vec<FileRange>,
}

/// A requested run of a file: one segment or one target.
pub(super) struct Area {
    pub(super) file: usize,
    pub(super) range: Range<u64>,
    pub(super) owner: Owner,
}

impl Area {
    pub(super) fn segment(&self) -> usize {
        match self.owner {
            Owner::Segment(index) => index,
            Owner::Target(_) => unreachable!("a target is never extended"),
        }
    }
}

/// Cuts the runs to be read into items, for areas ordered by file and offset.
pub(super) fn cut_items(
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

/// The chunks that contain the areas, adjacent ones merged.
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
) -> Vec<FileRange> {
    let mut pieces = Vec::new();
    let mut push = |range: Range<u64>, to: Destination| {
        if !range.is_empty() {
            pieces.push(FileRange { range, to });
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

/// The run of `part` that can be read in place; empty at the end of `part` if there is none.
fn direct_range(
    facts: &FileFacts,
    requests: &[Request],
    area: &Area,
    part: &Range<u64>,
    item: &Range<u64>,
) -> Range<u64> {
    let none = part.end..part.end;
    let is_whole_and_new = part == item && matches!(area.owner, Owner::Segment(_));
    if facts.is_sealed && !is_whole_and_new {
        return none;
    }
    let range = match area.owner {
        // A segment includes the pages around the part.
        Owner::Segment(_) => part.clone(),
        // The caller's memory has no room for whole pages.
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
    if is_worth_a_request(facts, &range, item) {
        range
    } else {
        none
    }
}

/// Whether a piece deserves a separate request. Small ones do if that costs no more than staging
/// them: at most two per item, those that touch its ends on whole pages. Over a network, a request
/// costs more than the copy of a whole item.
fn is_worth_a_request(facts: &FileFacts, range: &Range<u64>, item: &Range<u64>) -> bool {
    if facts.is_elsewhere {
        return range == item;
    }
    let touches_an_end = range.start == item.start || range.end == item.end;
    let is_on_pages = range.start.is_multiple_of(PAGE_BYTES)
        && (range.end.is_multiple_of(PAGE_BYTES) || range.end == item.end);
    range.end - range.start >= DIRECT_BYTES_MIN || (touches_an_end && is_on_pages)
}

pub(crate) fn floor(value: u64, alignment: u64) -> u64 {
    value - value % alignment
}
