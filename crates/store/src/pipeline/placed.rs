//! Items of a read plan with their memory: assigns windows to pieces, and reads, digests and copies
//! there.

mod hashed;
mod sealed;

use std::ops::Range;
use std::sync::Arc;

use penstock_io::buffer::{DeviceFills, IoBuf, Memory};
use penstock_io::engine::{Op, OpKind};
use penstock_io::file::{Direct, File};

use super::damage::Damage;
use super::target::{Region, Rest, Window};
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::format::shard::PAGE_BYTES;
use crate::plan::read::{Destination, Item, Owner, floor};

/// A piece with its memory.
struct Landing {
    range: Range<u64>,
    place: Place,
    /// Bytes of a sealed file that are opened in their place already.
    opened: Range<u64>,
}

enum Place {
    /// Read in place; the window mirrors `read`, which surrounds the piece.
    Direct {
        window: Option<IoBuf>,
        read: Range<u64>,
    },
    /// Read into the item's staging run with this number, then copied to the window if there is
    /// one.
    Staged { run: usize, window: Option<Window> },
}

/// Adjacent pieces that go through staging, read with one request.
struct StagingRun {
    read: Range<u64>,
    buf: Option<IoBuf>,
}

/// An item with the memory for its pieces.
pub(super) struct PlacedItem {
    pub(super) file: usize,
    pub(super) range: Range<u64>,
    landings: Vec<Landing>,
    runs: Vec<StagingRun>,
    /// The second read, if it needs another file than the first.
    again: Option<Again>,
    pub(super) retried: bool,
    /// Why it could not be read, if it could not.
    pub(super) unreadable: Option<String>,
    pub(super) operations_left: usize,
}

/// A second read that bypasses the page cache: through a newly opened file, into separate memory,
/// since the final memory need not be aligned for direct I/O.
struct Again {
    file: Arc<File>,
    read: Range<u64>,
    buf: Option<IoBuf>,
}

impl Again {
    fn past_cache(file: &File, range: &Range<u64>) -> Option<Again> {
        let file = file.again(Direct::Auto).ok()?;
        let read = floor(range.start, PAGE_BYTES)..range.end.next_multiple_of(PAGE_BYTES);
        let memory = Memory::allocate((read.end - read.start) as usize).ok()?;
        let (_, buf) = memory.share();
        file.is_direct().then(|| Again {
            file: Arc::new(file),
            read,
            buf: Some(buf),
        })
    }
}

impl PlacedItem {
    pub(super) fn new(
        item: Item,
        alignment: u64,
        segments: &mut [Region],
        targets: &mut [Rest],
    ) -> PlacedItem {
        let aligned = |range: &Range<u64>| {
            floor(range.start, alignment)..range.end.next_multiple_of(alignment)
        };
        let mut window = |owner: Owner, range: &Range<u64>| match owner {
            Owner::Segment(index) => Window::Plain(segments[index].window(range)),
            Owner::Target(index) => targets[index].window(range),
        };
        let mut landings: Vec<Landing> = Vec::with_capacity(item.pieces.len());
        let mut runs: Vec<StagingRun> = Vec::new();
        let mut run_is_open = false;
        for piece in item.pieces {
            let staged = match piece.to {
                Destination::Direct(owner) => {
                    let read = aligned(&piece.range);
                    let Window::Plain(window) = window(owner, &read) else {
                        unreachable!("what is scattered is staged")
                    };
                    let window = Some(window);
                    run_is_open = false;
                    landings.push(Landing {
                        range: piece.range,
                        place: Place::Direct { window, read },
                        opened: 0..0,
                    });
                    continue;
                }
                Destination::Copy(owner) => Some(window(owner, &piece.range)),
                Destination::Discard => None,
            };
            let read = aligned(&piece.range);
            match runs.last_mut() {
                Some(run) if run_is_open => run.read.end = read.end,
                _ => runs.push(StagingRun { read, buf: None }),
            }
            run_is_open = true;
            let place = Place::Staged {
                run: runs.len() - 1,
                window: staged,
            };
            landings.push(Landing {
                range: piece.range,
                place,
                opened: 0..0,
            });
        }
        let range = item.range;
        let file = item.file;
        PlacedItem {
            file,
            range,
            landings,
            runs,
            again: None,
            retried: false,
            unreadable: None,
            operations_left: 0,
        }
    }

    /// Whether part of it goes through staging.
    pub(super) fn needs_staging(&self) -> bool {
        !self.runs.is_empty()
    }

    /// Divides one buffer among the staging runs.
    pub(super) fn stage(&mut self, mut buf: IoBuf) {
        for run in &mut self.runs {
            let rest = buf.split_off((run.read.end - run.read.start) as usize);
            run.buf = Some(std::mem::replace(&mut buf, rest));
        }
    }

    /// Prepares a second read of the item, bypassing the page cache if possible: the cache returns
    /// the same bytes again, and the device may return others.
    pub(super) fn retry(&mut self, file: &File) {
        self.retried = true;
        self.unreadable = None;
        if !file.is_direct() {
            let _ = file.drop_cache();
            self.again = Again::past_cache(file, &self.range);
        }
    }

    /// Copies the bytes of a second read to their places.
    pub(super) fn place_reread(&mut self) {
        let Some(again) = self.again.take() else {
            return;
        };
        let buf = again.buf.expect("the read is back");
        self.put(again.read.start, buf.as_slice());
    }

    /// Copies bytes of the file, which begin at an offset, to their places.
    pub(super) fn put(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        for landing in &mut self.landings {
            let range = landing.range.start.max(offset)..landing.range.end.min(end);
            if range.is_empty() {
                continue;
            }
            let bytes = &bytes[(range.start - offset) as usize..(range.end - offset) as usize];
            let (place, read) = match &mut landing.place {
                Place::Direct { window, read } => (window, &*read),
                Place::Staged { run, .. } => {
                    let run = &mut self.runs[*run];
                    (&mut run.buf, &run.read)
                }
            };
            let place = place.as_mut().expect("all reads of the item are back");
            let first = (range.start - read.start) as usize;
            place.as_mut_slice()[first..first + bytes.len()].copy_from_slice(bytes);
        }
    }

    /// The requests that read the item. Tokens count the direct landings first, then the runs.
    pub(super) fn operations(&mut self, slot: usize, file: &Arc<File>) -> Vec<Op> {
        if let Some(again) = &mut self.again {
            self.operations_left = 1;
            let (offset, buf) = (again.read.start, again.buf.take());
            let buf = buf.expect("it is read once");
            return vec![Op {
                token: token(slot, 0),
                file: Arc::clone(&again.file),
                kind: OpKind::Read { offset, buf },
            }];
        }
        let landings = self
            .landings
            .iter_mut()
            .filter_map(|landing| match &mut landing.place {
                Place::Direct { window, read } => Some((read.start, window.take())),
                Place::Staged { .. } => None,
            });
        let runs = self
            .runs
            .iter_mut()
            .map(|run| (run.read.start, run.buf.take()));
        let reads: Vec<_> = landings.chain(runs).collect();
        self.operations_left = reads.len();
        let op = |(number, (offset, buf)): (usize, (u64, Option<IoBuf>))| Op {
            token: token(slot, number),
            file: Arc::clone(file),
            kind: OpKind::Read {
                offset,
                buf: buf.expect("a buffer is back once its read is"),
            },
        };
        reads.into_iter().enumerate().map(op).collect()
    }

    /// Returns the buffer of a finished read to its place; returns the byte range that was
    /// requested.
    pub(super) fn give_back(&mut self, number: usize, buf: IoBuf) -> Range<u64> {
        self.operations_left -= 1;
        if let Some(again) = &mut self.again {
            again.buf = Some(buf);
            return again.read.clone();
        }
        let direct = self
            .landings
            .iter_mut()
            .filter_map(|landing| match &mut landing.place {
                Place::Direct { window, read } => Some((window, read)),
                Place::Staged { .. } => None,
            });
        let runs = self
            .runs
            .iter_mut()
            .map(|run| (&mut run.buf, &mut run.read));
        let (place, read) = direct
            .chain(runs)
            .nth(number)
            .expect("the token names a read");
        *place = Some(buf);
        read.clone()
    }

    /// The bytes of a landing, wherever they were read to.
    fn bytes<'a>(&'a self, landing: &'a Landing) -> &'a [u8] {
        let (buf, read) = match &landing.place {
            Place::Direct { window, read } => (window, read),
            Place::Staged { run, .. } => (&self.runs[*run].buf, &self.runs[*run].read),
        };
        let buf = buf
            .as_ref()
            .expect("all reads of the item are back")
            .as_slice();
        let first = (landing.range.start - read.start) as usize;
        &buf[first..first + (landing.range.end - landing.range.start) as usize]
    }

    /// The chunks that do not match their recorded digest.
    fn damaged_chunks(&self, chunks: &[Digest]) -> Vec<Damage> {
        let mut damaged = Vec::new();
        let mut running = Digest::EMPTY;
        for landing in &self.landings {
            let mut bytes = self.bytes(landing);
            let mut at = landing.range.start;
            while !bytes.is_empty() {
                let chunk_start = floor(at, CHUNK_BYTES);
                let chunk_end = (chunk_start + CHUNK_BYTES).min(self.range.end);
                let length = bytes.len().min((chunk_end - at) as usize);
                let (now, later) = bytes.split_at(length);
                let digest = Digest::of(now);
                let begins_chunk = at == chunk_start;
                running = if begins_chunk {
                    digest
                } else {
                    running.then(digest, length as u64)
                };
                at += length as u64;
                bytes = later;
                let index = (chunk_start / CHUNK_BYTES) as usize;
                if at == chunk_end && running != chunks[index] {
                    let byte = chunks[index].changed_byte(running, chunk_end - chunk_start);
                    damaged.push(Damage {
                        file: self.file,
                        range: chunk_start..chunk_end,
                        byte: byte.map(|byte| chunk_start + byte),
                        unreadable: None,
                        is_tampered: false,
                    });
                }
            }
        }
        damaged
    }

    /// The whole item as damage if it could not be read; otherwise the chunks that do not match
    /// their recorded digest, if there are digests.
    pub(super) fn damage(&self, chunks: Option<&[Digest]>) -> Vec<Damage> {
        let Some(reason) = &self.unreadable else {
            return chunks.map_or_else(Vec::new, |chunks| self.damaged_chunks(chunks));
        };
        let starts = (self.range.start..self.range.end).step_by(CHUNK_BYTES as usize);
        let chunk = |start: u64| Damage {
            file: self.file,
            range: start..(start + CHUNK_BYTES).min(self.range.end),
            byte: None,
            unreadable: Some(reason.clone()),
            is_tampered: false,
        };
        starts.map(chunk).collect()
    }

    /// Copies staged bytes to their places, and adds the copies that devices must make to `fills`;
    /// returns the number of bytes copied by the host.
    pub(super) fn unstage(mut self, fills: &mut DeviceFills) -> u64 {
        let mut copied = 0;
        let (first_buf, bytes_before) = (fills.bufs(), fills.bytes());
        for landing in &mut self.landings {
            if let Place::Staged {
                run: number,
                window: Some(window),
            } = &mut landing.place
            {
                let run = &self.runs[*number];
                let first = (landing.range.start - run.read.start) as usize;
                let staged = run
                    .buf
                    .as_ref()
                    .expect("all reads of the item are back")
                    .as_slice();
                let bytes = (landing.range.end - landing.range.start) as usize;
                let bytes = &staged[first..first + bytes];
                let staged = (first_buf + *number, first);
                copied += match landing.opened.is_empty() {
                    true => window.fill(&landing.range, bytes, staged, fills),
                    false => window.fill_around(&landing.range, &landing.opened, bytes),
                };
            }
        }
        if fills.bytes() > bytes_before {
            fills.keep(self.runs.into_iter().filter_map(|run| run.buf));
        }
        copied
    }
}

/// Numbers the operations of an item within its worker's slot.
pub(super) fn token(slot: usize, number: usize) -> u64 {
    (slot as u64) << 32 | number as u64
}

pub(super) fn untoken(token: u64) -> (usize, usize) {
    ((token >> 32) as usize, (token & 0xffff_ffff) as usize)
}
