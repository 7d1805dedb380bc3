//! Lending: extents that are written from the caller's own memory, without a copy.
//!
//! A piece of a tensor is lent if it is long, and lies where the device takes it: at multiples of a
//! page in the file, and of the device's alignment in memory. The rest of its extent, if it is long
//! enough for requests of its own, is copied to a staging buffer, of which windows are written
//! beside the lent pieces; otherwise all of the extent is copied.
//!
//! The digest of a lent piece is that of the bytes that are written only if nobody changes them in
//! between. A [`Watch`] of the kernel finds pages that were written to since it began, and a second
//! digest (`pipeline::write`) finds writes that cause no page fault, such as those of devices. An
//! extent that was changed is copied and written again. A job with a watch of its own fails in that
//! case, as it does if anybody changes what is not copied yet.
//! Without a watch nothing is lent, and nothing in small pages: to protect and to pin these takes
//! more time than to copy them.
//!
//! The claim of an extent is held until its last request has completed, so the caller does not get
//! its memory back while the kernel reads it.

use std::ops::Range;
use std::sync::Arc;

use penstock_io::buffer::{HostRegion, HugePages, IoBuf, Region, Watch};
use penstock_io::file::File;
use penstock_io::trace;

use super::StagingQueue;
use super::claim::Claim;
use super::state::Filled;
use crate::error::Result;
use crate::format::shard::PAGE_BYTES;
use crate::plan::write::{ExtentPart, WritePlan};

/// Shortest request for a part of an extent that is lent: a shorter one costs more than a copy.
const PIECE_BYTES_MIN: u64 = 256 << 10;

/// Least amount in all for which memory is watched.
const LENT_BYTES_MIN: u64 = 16 << 20;

/// The regions of a save that may be lent.
pub(in crate::pipeline) struct Lending {
    /// By index of the region.
    is_lendable: Vec<bool>,
    /// Shortest request for a part of an extent.
    piece_bytes_min: u64,
    /// `None` for a job that is watched anyway.
    watch: Option<Watch>,
}

/// An extent whose bytes are partly in the caller's memory.
pub(in crate::pipeline) struct LentExtent<'a> {
    pub(in crate::pipeline) number: u64,
    /// Its pieces, in order and without gaps, up to a whole page.
    pub(in crate::pipeline) segments: Vec<IoBuf>,
    pub(in crate::pipeline) loan: Loan<'a>,
}

/// The hold of an extent on the caller's memory.
pub(in crate::pipeline) struct Loan<'a> {
    claim: Claim<'a>,
    /// Addresses of the lent pieces.
    lent: Vec<Range<usize>>,
}

/// A piece of a tensor that is lent.
struct LentPiece {
    /// Where it is in the extent.
    place: Range<usize>,
    tensor: usize,
    /// Where it is in the tensor.
    content: Range<u64>,
}

impl Lending {
    /// Whether nobody has written to memory of a loan that is written to its end.
    pub(in crate::pipeline) fn is_unchanged(&self, loan: &Loan<'_>) -> bool {
        let changed = |watch: &Watch| loan.lent.iter().any(|lent| watch.is_written(lent));
        !self.watch.as_ref().is_some_and(changed)
    }
}

impl Loan<'_> {
    /// Copies the extent after all, once nothing of it is in flight.
    pub(in crate::pipeline) fn copy(mut self, buf: IoBuf) -> Result<Filled> {
        self.claim.copy(buf, &[])
    }

    /// Ends the loan of an extent that is written.
    pub(in crate::pipeline) fn end(mut self) {
        self.claim.numbers.start = self.claim.numbers.end;
    }

    pub(in crate::pipeline) fn bytes(&self) -> u64 {
        self.lent.iter().map(|lent| lent.len() as u64).sum()
    }
}

impl StagingQueue {
    /// Whether lending may pay: workers take what is not staged, enough of it, to direct files.
    pub(in crate::pipeline) fn may_lend(&self, files: &[Arc<File>], lends_all: bool) -> bool {
        self.is_lazy
            && (lends_all || self.plan.bytes() >= LENT_BYTES_MIN)
            && files.iter().all(|file| file.is_direct())
    }

    /// Begins to lend memory for writes to direct files, one for each shard.
    ///
    /// # Errors
    /// The reason that nothing is lent.
    pub(in crate::pipeline) fn begin_lending(
        &self,
        files: &[Arc<File>],
        lends_all: bool,
    ) -> std::result::Result<Lending, String> {
        let alignments = files.iter().map(|file| file.alignment().memory);
        let alignment = alignments.max().unwrap_or(1);
        let state = self.lock();
        let Some(sources) = state.sources.lent().cloned() else {
            return Err("the state is staged".to_owned());
        };
        let is_watched = self.edges.is_some();
        drop(state);
        let (piece_bytes_min, bytes_min) = match lends_all {
            true => (PAGE_BYTES, 1),
            false => (PIECE_BYTES_MIN, LENT_BYTES_MIN),
        };
        let check = |wanted: &[usize], place: &str| {
            let bytes: u64 = wanted.iter().map(|&index| sources[index].len()).sum();
            match bytes < bytes_min {
                true => Err(format!("less than 16 MiB of the state is {place}")),
                false => Ok(()),
            }
        };
        let mut wanted = aligned(&self.plan, &sources, alignment, piece_bytes_min);
        check(
            &wanted,
            &format!("at multiples of {alignment} bytes in memory"),
        )?;
        if !lends_all {
            keep_huge(&sources, &mut wanted);
            check(&wanted, "in huge pages")?;
        }
        let mut is_lendable = vec![false; sources.len()];
        let (watch, watched) = match is_watched {
            true => (None, wanted),
            false => {
                let _span = trace::span("watch");
                let begun = Watch::begin_where_possible(Arc::clone(&sources), wanted);
                let (watch, watched) = begun.map_err(|reason| reason.to_string())?;
                check(&watched, "in memory of this process alone")?;
                (Some(watch), watched)
            }
        };
        watched
            .into_iter()
            .for_each(|index| is_lendable[index] = true);
        Ok(Lending {
            is_lendable,
            piece_bytes_min,
            watch,
        })
    }
}

/// The regions that a device takes from where they are in memory.
fn aligned(plan: &WritePlan, sources: &[Region], alignment: usize, bytes_min: u64) -> Vec<usize> {
    let placed = plan
        .shards
        .iter()
        .flat_map(|shard| shard.tensors.iter().zip(&shard.starts));
    let suits = |(&index, &start): (&u32, &u64)| {
        let index = index as usize;
        let region = sources[index].host()?;
        if !region.is_contiguous() || region.len() < bytes_min {
            return None;
        }
        let address = region.addresses(&(0..0)).start as u64;
        let is_aligned = address.wrapping_sub(start).is_multiple_of(alignment as u64);
        is_aligned.then_some(index)
    };
    let mut suited: Vec<usize> = placed.filter_map(suits).collect();
    suited.sort_unstable();
    suited
}

/// Leaves the regions that are mostly in huge pages.
fn keep_huge(sources: &[Region], wanted: &mut Vec<usize>) {
    let Ok(pages) = HugePages::open() else {
        return wanted.clear();
    };
    wanted.retain(|&index| {
        let region = sources[index].host().expect("the host's were selected");
        pages.bytes(region) >= region.len() / 4 * 3
    });
}

impl<'a> Claim<'a> {
    /// Lends the next extent, with the parts that cannot be lent in `buf`; gives both back if too
    /// little of it can be lent.
    pub(super) fn lend(
        self,
        buf: IoBuf,
        lending: &Lending,
    ) -> std::result::Result<LentExtent<'a>, (Claim<'a>, IoBuf)> {
        let number = self.numbers.start;
        let pieces = self.lent_pieces(number, lending);
        let bytes = self.staging_queue.plan.extent(number).bytes();
        if !pays(&pieces, bytes, lending.piece_bytes_min) {
            return Err((self, buf));
        }
        let _span = trace::span("lend");
        let sources = Arc::clone(self.sources.as_ref().expect("the claim is not dropped"));
        let mut rest = self.copy_between(number, buf, &pieces);
        let mut segments = Vec::with_capacity(2 * pieces.len() + 1);
        let mut lent = Vec::with_capacity(pieces.len());
        let mut at = 0;
        for LentPiece {
            place,
            tensor,
            content,
        } in pieces
        {
            let behind = rest.split_off(place.start - at);
            segments.extend(Some(rest).filter(|gap| !gap.is_empty()));
            let window = Region::window(&sources, tensor, &content);
            lent.push(window.address()..window.address() + window.len());
            segments.push(window);
            let mut under = behind;
            rest = under.split_off(place.len());
            at = place.end;
        }
        segments.extend(Some(rest).filter(|gap| !gap.is_empty()));
        let loan = Loan { claim: self, lent };
        Ok(LentExtent {
            number,
            segments,
            loan,
        })
    }

    /// The pieces of an extent that can be lent, in order.
    fn lent_pieces(&self, number: u64, lending: &Lending) -> Vec<LentPiece> {
        let plan = &self.staging_queue.plan;
        let extent = plan.extent(number);
        let sources = self.sources.as_ref().expect("the claim is not dropped");
        let mut pieces = Vec::new();
        let mut is_on_host = true;
        let mut offset = extent.range.start;
        plan.pieces(&extent, |piece| match piece {
            ExtentPart::Header(header) => offset += header.len() as u64,
            ExtentPart::Tensor {
                tensor,
                start,
                bytes,
            } => {
                let region = sources[tensor].host();
                is_on_host &= region.is_some();
                if let Some(region) = region.filter(|_| lending.is_lendable[tensor])
                    && let content = lent_content(region, start..start + bytes, offset)
                    && content.end - content.start >= lending.piece_bytes_min
                {
                    let at = offset - extent.range.start + content.start - start;
                    let place = at as usize..(at + content.end - content.start) as usize;
                    pieces.push(LentPiece {
                        place,
                        tensor,
                        content,
                    });
                }
                offset += bytes;
            }
        });
        match is_on_host {
            true => pieces,
            false => Vec::new(),
        }
    }

    /// Copies the parts of an extent that are not lent to their places in the buffer, and pads it
    /// to a whole page.
    fn copy_between(&self, number: u64, mut buf: IoBuf, pieces: &[LentPiece]) -> IoBuf {
        let plan = &self.staging_queue.plan;
        let sources = self.sources.as_ref().expect("the claim is not dropped");
        let extent = plan.extent(number);
        let bytes = extent.bytes();
        buf.set_len(bytes.next_multiple_of(PAGE_BYTES as usize));
        let target = buf.as_mut_slice();
        let mut pieces = pieces.iter().peekable();
        let mut at = 0;
        plan.pieces(&extent, |piece| match piece {
            ExtentPart::Header(header) => {
                target[at..at + header.len()].copy_from_slice(header);
                at += header.len();
            }
            ExtentPart::Tensor {
                tensor,
                start,
                bytes,
            } => {
                let end = at + bytes as usize;
                let lent = match pieces.next_if(|piece| piece.place.start < end) {
                    Some(piece) => piece.place.clone(),
                    None => end..end,
                };
                for gap in [at..lent.start, lent.end..end] {
                    if let (false, Region::Host(source)) = (gap.is_empty(), &sources[tensor]) {
                        let from = start + (gap.start - at) as u64;
                        self.copy_host(tensor, source, from, &mut target[gap], None);
                    }
                }
                at = end;
            }
        });
        target[bytes..].fill(0);
        buf
    }
}

/// Whether to lend pieces of an extent of `bytes`: they are half of it, and neither they nor the
/// gaps between them take short requests, which would be many in a state of small tensors.
fn pays(pieces: &[LentPiece], bytes: usize, request_bytes_min: u64) -> bool {
    let lent_bytes: usize = pieces.iter().map(|piece| piece.place.len()).sum();
    let end = bytes.next_multiple_of(PAGE_BYTES as usize);
    let starts = pieces.iter().map(|piece| piece.place.start).chain([end]);
    let ends = [0]
        .into_iter()
        .chain(pieces.iter().map(|piece| piece.place.end));
    let mut gaps = starts.zip(ends).map(|(start, end)| (start - end) as u64);
    lent_bytes * 2 >= bytes && gaps.all(|gap| gap == 0 || gap >= request_bytes_min)
}

/// The part to lend of a range of a region's content that begins at an offset of a file.
fn lent_content(region: &HostRegion, range: Range<u64>, offset: u64) -> Range<u64> {
    // A file system writes whole pages without waiting for other requests.
    let skipped = offset.next_multiple_of(PAGE_BYTES) - offset;
    let range = range.start + skipped..range.end;
    Watch::protectable(region, &range, PAGE_BYTES)
}
