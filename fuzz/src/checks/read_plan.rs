//! Loads decoded from bytes, and the properties of every read plan.

use std::ops::Range;

use penstock_store::format::digest::CHUNK_BYTES;
use penstock_store::format::shard::PAGE_BYTES;
use penstock_store::plan::read::{
    Destination, FileFacts, Goal, Item, Owner, Placement, ReadPlan, Request, plan,
};

/// Most extents of all files together, because a plan is as long as the data it reads.
const EXTENTS_MAX: u64 = 1024;
/// Most fresh memory in addition to a request: a gap of a page to its neighbour, or the rest of
/// the pages at its two ends.
const OVERHEAD_BYTES_PER_REQUEST: u64 = 2 * PAGE_BYTES;
/// Most bytes of several requests in one segment, for loads up to 64 GiB.
const SEGMENT_BYTES_MAX: u64 = 4 << 20;
/// See `STAGING_SLACK_BYTES` of `options.rs`.
const STAGING_SLACK_BYTES: u64 = 64 << 10;
const RECORD_BYTES: usize = 8;

/// Any arguments that a part and a caller may give to [`plan`].
#[derive(Debug)]
pub struct Load {
    files: Vec<FileFacts>,
    requests: Vec<Request>,
    cover_all: bool,
    extent_bytes: u64,
}

impl Load {
    /// Decodes a load from records of eight bytes: one for the whole load, then one for each
    /// request.
    ///
    /// A request is flags, the shifts of gap and length, gap, length and address. Every input is a
    /// valid load: requests are inside their files and do not overlap.
    pub fn decode(input: &[u8]) -> Load {
        let (records, _) = input.as_chunks::<RECORD_BYTES>();
        let (&[flags, extent, tail_low, tail_high, shift, ..], records) =
            records.split_first().unwrap_or((&[0; RECORD_BYTES], &[]));
        let extent_bytes = (CHUNK_BYTES * (1 + u64::from(extent >> 4))) << (extent & 15);
        let (offset_alignment, memory_alignment) = match flags >> 1 & 3 {
            0 => (1, 1),
            1 => (PAGE_BYTES, 1),
            2 => (PAGE_BYTES, 512),
            _ => (PAGE_BYTES, 4096),
        };
        let empty = FileFacts {
            bytes: 0,
            offset_alignment,
            memory_alignment,
            // Like objects, which have no alignment.
            is_elsewhere: flags & 8 == 8 && offset_alignment == 1,
            is_sealed: flags & 16 == 16,
        };
        let mut load = Load {
            files: Vec::new(),
            requests: Vec::new(),
            cover_all: flags & 1 == 1,
            extent_bytes,
        };
        let mut left = extent_bytes * EXTENTS_MAX;
        let mut take = |wanted: u64| {
            let taken = wanted.min(left);
            left -= taken;
            taken
        };
        for &[
            flags,
            shifts,
            gap_low,
            gap_high,
            low,
            high,
            address_low,
            address_high,
        ] in records
        {
            if flags & 1 == 1 || load.files.is_empty() {
                load.files.push(empty);
            }
            let file = load.files.len() - 1;
            let at = &mut load.files[file].bytes;
            *at += take(number(gap_low, gap_high) << (shifts & 15));
            // Each step shifts by two bits, because segments grow beyond a certain size.
            let start = *at;
            *at += take(number(low, high) << (shifts >> 4 << 1));
            let address = number(address_low, address_high) as usize;
            let request = Request {
                file,
                range: start..*at,
                goal: match flags & 10 {
                    2 => Goal::Plain(0x7000_0000_0000 + address),
                    10 => Goal::Scattered,
                    _ => Goal::Fresh,
                },
            };
            // Callers pass requests in any order.
            let place = if flags & 4 == 4 {
                address % (load.requests.len() + 1)
            } else {
                load.requests.len()
            };
            load.requests.insert(place, request);
        }
        if let Some(file) = load.files.last_mut() {
            file.bytes += take(number(tail_low, tail_high) << (shift & 31));
        }
        load
    }

    /// Approximate length of such a checkpoint's part, to which a plan's memory is compared.
    pub fn part_bytes(&self) -> usize {
        const TENSOR_BYTES: usize = 55;
        const CHUNK_DIGEST_BYTES: u64 = 19;
        let chunks: u64 = self
            .files
            .iter()
            .map(|file| file.bytes.div_ceil(CHUNK_BYTES))
            .sum();
        self.requests.len() * TENSOR_BYTES + (chunks * CHUNK_DIGEST_BYTES) as usize
    }

    /// Plans the load and checks the plan's properties.
    pub fn check(&self) {
        let plan = plan(
            &self.files,
            &self.requests,
            self.cover_all,
            self.extent_bytes,
        );
        self.check_items(&plan);
        self.check_placements(&plan);
        self.check_segments(&plan);
        self.check_windows(&plan);
    }

    /// Items are whole chunks in order, inside extent and file, and pieces cover all of their
    /// bytes.
    fn check_items(&self, plan: &ReadPlan) {
        let mut ends = vec![0; self.files.len()];
        let mut last = 0;
        for Item {
            file,
            range,
            pieces,
        } in &plan.items
        {
            let bytes = self.files[*file].bytes;
            assert!(
                *file >= last && range.start >= ends[*file],
                "items in order"
            );
            assert!(
                range.start < range.end && range.end <= bytes,
                "items inside the file"
            );
            assert!(
                range.start.is_multiple_of(CHUNK_BYTES),
                "chunks from their start"
            );
            assert!(
                range.end.is_multiple_of(CHUNK_BYTES) || range.end == bytes,
                "to their end"
            );
            assert_eq!(
                range.start / self.extent_bytes,
                (range.end - 1) / self.extent_bytes
            );
            assert!(
                !self.cover_all || range.start == ends[*file],
                "every byte is read"
            );
            let mut at = range.start;
            for piece in pieces {
                assert!(
                    piece.range.start == at && piece.range.end > at,
                    "pieces without gaps"
                );
                at = piece.range.end;
            }
            assert_eq!(at, range.end);
            ends[*file] = range.end;
            last = *file;
        }
        for (end, file) in ends.iter().zip(&self.files) {
            assert!(!self.cover_all || *end == file.bytes, "every byte is read");
        }
    }

    /// Each byte of a request is in one piece, whose destination is that of the placement.
    fn check_placements(&self, plan: &ReadPlan) {
        assert_eq!(plan.placements.len(), self.requests.len());
        let pieces: Vec<(usize, &Range<u64>, Destination)> = plan
            .items
            .iter()
            .flat_map(|item| {
                item.pieces
                    .iter()
                    .map(|piece| (item.file, &piece.range, piece.to))
            })
            .collect();
        for (index, request) in self.requests.iter().enumerate() {
            let owner = match plan.placements[index] {
                Placement::Empty => {
                    assert!(request.range.is_empty());
                    continue;
                }
                Placement::Target => Owner::Target(index),
                Placement::Segment { segment, offset } => {
                    let mirrored = &plan.segments[segment];
                    assert_eq!(mirrored.file, request.file);
                    assert_eq!(mirrored.mirror.start + offset, request.range.start);
                    assert!(request.range.end <= mirrored.mirror.end);
                    Owner::Segment(segment)
                }
            };
            assert_eq!(request.goal != Goal::Fresh, owner == Owner::Target(index));
            let mut at = request.range.start;
            let first = pieces.partition_point(|(file, range, _)| {
                (*file, range.end) <= (request.file, request.range.start)
            });
            for (file, range, to) in &pieces[first..] {
                if at >= request.range.end {
                    break;
                }
                assert!(
                    *file == request.file && range.start <= at,
                    "every byte is in a piece"
                );
                assert_eq!(owner_of(*to), Some(owner), "every byte in its place");
                at = range.end;
            }
            assert!(at >= request.range.end);
        }
    }

    /// Fresh memory is in proportion to the requests.
    fn check_segments(&self, plan: &ReadPlan) {
        let fresh = self
            .requests
            .iter()
            .filter(|request| request.goal == Goal::Fresh);
        let fresh: Vec<u64> = fresh
            .map(|r| r.range.end - r.range.start)
            .filter(|&n| n > 0)
            .collect();
        let asked: u64 = self
            .requests
            .iter()
            .map(|r| r.range.end - r.range.start)
            .sum();
        let longest = fresh.iter().copied().max().unwrap_or(0);
        let overhead = OVERHEAD_BYTES_PER_REQUEST * fresh.len() as u64;
        let mut bytes = 0;
        for segment in &plan.segments {
            let mirror = &segment.mirror;
            assert!(
                mirror.start.is_multiple_of(PAGE_BYTES) && mirror.end.is_multiple_of(PAGE_BYTES)
            );
            let held = mirror.end - mirror.start;
            let most = longest.max(SEGMENT_BYTES_MAX).max(asked >> 14) + 2 * PAGE_BYTES;
            assert!(held <= most, "a segment of {held} bytes");
            bytes += held;
        }
        let most = fresh.iter().sum::<u64>() + overhead;
        assert!(bytes <= most, "{bytes} bytes of segments, {most} allowed");
    }

    /// The pipeline can execute the plan: memory is handed out from front to back, direct reads
    /// stay in their own memory, staging fits its buffer.
    fn check_windows(&self, plan: &ReadPlan) {
        let mut segments: Vec<u64> = plan.segments.iter().map(|s| s.mirror.start).collect();
        let mut targets: Vec<u64> = self.requests.iter().map(|r| r.range.start).collect();
        for item in &plan.items {
            let facts = &self.files[item.file];
            let alignment = facts.offset_alignment;
            let mut staged = 0;
            let mut run_end = None;
            for piece in &item.pieces {
                let read = piece.range.start / alignment * alignment
                    ..piece.range.end.next_multiple_of(alignment);
                let is_direct = matches!(piece.to, Destination::Direct(_));
                let window = if is_direct { &read } else { &piece.range };
                match owner_of(piece.to) {
                    Some(Owner::Segment(index)) => {
                        assert!(segments[index] <= window.start, "windows do not overlap");
                        assert!(window.end <= plan.segments[index].mirror.end);
                        segments[index] = window.end;
                    }
                    Some(Owner::Target(index)) => {
                        assert_eq!(targets[index], window.start, "a target has no gaps");
                        assert!(window.end <= self.requests[index].range.end);
                        targets[index] = window.end;
                        assert!(
                            !is_direct
                                || self
                                    .address(index, window.start)
                                    .is_multiple_of(facts.memory_alignment)
                        );
                    }
                    None => {}
                }
                if is_direct {
                    run_end = None;
                } else {
                    staged += read.end - run_end.unwrap_or(read.start);
                    run_end = Some(read.end);
                }
            }
            assert!(
                staged <= self.extent_bytes + STAGING_SLACK_BYTES,
                "{staged} bytes staged"
            );
        }
        for (end, request) in targets.iter().zip(&self.requests) {
            assert!(request.goal == Goal::Fresh || *end == request.range.end);
        }
    }

    fn address(&self, index: usize, offset: u64) -> usize {
        let request = &self.requests[index];
        let Goal::Plain(address) = request.goal else {
            panic!("only plain memory is read into in place")
        };
        address + (offset - request.range.start) as usize
    }
}

fn owner_of(to: Destination) -> Option<Owner> {
    match to {
        Destination::Discard => None,
        Destination::Copy(owner) | Destination::Direct(owner) => Some(owner),
    }
}

fn number(low: u8, high: u8) -> u64 {
    u64::from(u16::from_le_bytes([low, high]))
}
