//! Claims: extents that one thread copies.
//!
//! A worker of a sealed save seals while it copies: a chunk of one host tensor goes through the
//! cipher on its way to the staging buffer. Chunks of several pieces, and those of devices, are
//! sealed in the buffer later (`pipeline::write`). A stager does not seal, as a caller waits.

use std::ops::Range;
use std::sync::Arc;

use penstock_io::buffer::{DeviceCopies, HostRegion, IoBuf, Region};
use penstock_io::trace;

use super::StagingQueue;
use super::state::Filled;
use crate::error::{Error, Result};
use crate::format::digest::{CHUNK_BYTES, ChunkDigester};
use crate::format::shard::PAGE_BYTES;
use crate::plan::write::ExtentPart;
use crate::seal::{ShardSealer, Tag};

/// Bytes that are copied and then digested: in the nearest cache, a fifth of the time of both is saved.
const DIGESTED_BYTES: usize = 4096;

/// Extents that one thread has claimed, in order.
pub(in crate::pipeline) struct Claim<'a> {
    pub(super) staging_queue: &'a StagingQueue,
    /// `None` only while dropping.
    pub(super) sources: Option<Arc<Vec<Region>>>,
    /// Not copied yet.
    pub(super) numbers: Range<u64>,
    is_stager: bool,
}

impl StagingQueue {
    /// Claims up to `extents` extents; `None` once all are claimed or the save is over.
    pub(super) fn claim(&self, extents: u64, is_stager: bool) -> Option<Claim<'_>> {
        let mut state = self.lock();
        if state.is_over() || state.is_exhausted() {
            return None;
        }
        let start = state.next;
        state.next = start.saturating_add(extents).min(self.plan.extents());
        match is_stager {
            true => state.staging += 1,
            false => state.filling += 1,
        }
        Some(Claim {
            staging_queue: self,
            sources: state.sources.lent().cloned(),
            numbers: start..state.next,
            is_stager,
        })
    }
}

impl Claim<'_> {
    /// Copies the next extent into the buffer, or queues its device copies, and pads it to a whole
    /// page.
    pub(super) fn copy(&mut self, buf: IoBuf, sealers: &[ShardSealer]) -> Result<Filled> {
        let mut copied = self.copy_all(vec![buf], sealers)?;
        Ok(copied.pop().expect("one for each buffer"))
    }

    /// Copies as many extents as there are buffers.
    pub(super) fn copy_all(
        &mut self,
        bufs: Vec<IoBuf>,
        sealers: &[ShardSealer],
    ) -> Result<Vec<Filled>> {
        let numbers = self.numbers.start..self.numbers.start + bufs.len() as u64;
        let sources = self.sources.clone().expect("the claim is not dropped");
        let (mut placed, mut notes) = (Vec::new(), Vec::new());
        for (number, buf) in numbers.clone().zip(bufs) {
            let mut tags = Vec::new();
            let mut digester = (!self.is_stager && sealers.is_empty()).then(ChunkDigester::default);
            placed.push(self.place(&sources, number, buf, sealers, &mut tags, &mut digester)?);
            let digests = digester.map_or_else(Vec::new, ChunkDigester::finish);
            notes.push((digests, tags));
        }
        let device_to_host = DeviceCopies::begin_all(placed)?;
        self.numbers.start = numbers.end;
        let filled = |((number, buf), (digests, tags))| Filled {
            number,
            buf,
            digests,
            tags,
        };
        let all = numbers.zip(device_to_host).zip(notes);
        Ok(all.map(filled).collect())
    }

    /// Copies the host's part of an extent, and lists the device's part. `tags` receives those of
    /// chunks that are sealed on the way; `digester` the bytes, or it becomes `None`.
    fn place<'a>(
        &self,
        sources: &'a [Region],
        number: u64,
        mut buf: IoBuf,
        sealers: &[ShardSealer],
        tags: &mut Vec<Option<Tag>>,
        digester: &mut Option<ChunkDigester>,
    ) -> Result<(DeviceCopies<'a>, IoBuf)> {
        let _span = trace::span("copy");
        let plan = &self.staging_queue.plan;
        let extent = plan.extent(number);
        let bytes = extent.bytes();
        buf.set_len(bytes.next_multiple_of(PAGE_BYTES as usize));
        let (mut rest, padding) = buf.as_mut_slice().split_at_mut(bytes);
        let mut copies = DeviceCopies::default();
        let mut sealed = sealers.get(extent.shard).map(|sealer| {
            tags.resize(bytes.div_ceil(CHUNK_BYTES as usize), None);
            SealedCopy {
                sealer,
                start: extent.range.start,
                end: extent.range.end,
                tags,
                failed: None,
            }
        });
        plan.pieces(&extent, |piece| match piece {
            ExtentPart::Header(header) => {
                take(&mut rest, header.len()).copy_from_slice(header);
                if let Some(digester) = digester {
                    digester.update(header);
                }
            }
            ExtentPart::Tensor {
                tensor,
                start,
                bytes: piece_bytes,
            } => {
                let at = bytes - rest.len();
                let place = take(&mut rest, piece_bytes as usize);
                match &sources[tensor] {
                    Region::Snapshot(source) => {
                        *digester = None;
                        copies.add_snapshot(source, start, at..at + place.len());
                    }
                    Region::Device(source) => {
                        *digester = None;
                        copies.add(source, start, at..at + place.len());
                    }
                    Region::Host(source) => match &mut sealed {
                        Some(sealed) => sealed.copy(at, place, start, |start, place, seal| {
                            self.copy_host(tensor, source, start, place, seal)
                        }),
                        None => self.copy_digested(tensor, source, start, place, digester),
                    },
                }
            }
        });
        padding.fill(0);
        if let Some(error) = sealed.and_then(|sealed| sealed.failed) {
            return Err(error);
        }
        Ok((copies, buf))
    }

    /// Copies a piece of a host tensor, and adds the copy to a digest while it is in a cache.
    fn copy_digested(
        &self,
        tensor: usize,
        source: &HostRegion,
        start: u64,
        place: &mut [u8],
        digester: &mut Option<ChunkDigester>,
    ) {
        let edges = self.staging_queue.edges.as_deref();
        let is_plain = source.is_contiguous()
            && !edges
                .is_some_and(|edges| edges.may_be_over(tensor, source, start, place.len() as u64));
        let Some(digester) = digester.as_mut().filter(|_| is_plain) else {
            _ = self.copy_host(tensor, source, start, place, None);
            if let Some(digester) = digester {
                digester.update(place);
            }
            return;
        };
        let mut start = start;
        for part in place.chunks_mut(DIGESTED_BYTES) {
            source.copy_to(start, part);
            digester.update(part);
            start += part.len() as u64;
        }
    }

    /// Copies a piece of a host tensor by `seal`, or plainly where that cannot be: the result is
    /// `None` then.
    pub(super) fn copy_host(
        &self,
        tensor: usize,
        source: &HostRegion,
        start: u64,
        place: &mut [u8],
        seal: Option<Seal<'_>>,
    ) -> Option<Result<Tag>> {
        let edges = self.staging_queue.edges.as_deref();
        if let Some(seal) = seal
            && source.is_contiguous()
            && !edges
                .is_some_and(|edges| edges.may_be_over(tensor, source, start, place.len() as u64))
        {
            return source.translate_to(start, place, seal);
        }
        // A worker digests and writes the extent at once; a staged one waits, so it bypasses the
        // caches.
        match self.is_stager {
            true => source.stream_to(start, place),
            false => source.copy_to(start, place),
        }
        if let Some(edges) = edges {
            edges.put_over(tensor, source, start, place);
        }
        None
    }
}

/// Seals a chunk on its way from the caller's memory to its place.
pub(super) type Seal<'a> = &'a dyn Fn(&[u8], &mut [u8]) -> Result<Tag>;

/// Seals the chunks of an extent that lie in one piece.
struct SealedCopy<'a> {
    sealer: &'a ShardSealer,
    /// The range of the extent in its file.
    start: u64,
    end: u64,
    tags: &'a mut Vec<Option<Tag>>,
    /// The first error.
    failed: Option<Error>,
}

impl SealedCopy<'_> {
    /// Copies a piece to `place`, which is byte `at` and after of the extent, by calls of `copy`:
    /// whole chunks with a function that seals, the rest without.
    fn copy(
        &mut self,
        at: usize,
        mut place: &mut [u8],
        mut source: u64,
        mut copy: impl FnMut(u64, &mut [u8], Option<Seal<'_>>) -> Option<Result<Tag>>,
    ) {
        let mut offset = self.start + at as u64;
        while !place.is_empty() {
            let index = offset / CHUNK_BYTES;
            let chunk_end = ((index + 1) * CHUNK_BYTES).min(self.end);
            let bytes = place.len().min((chunk_end - offset) as usize);
            let is_whole = offset.is_multiple_of(CHUNK_BYTES) && offset + bytes as u64 == chunk_end;
            let part = take(&mut place, bytes);
            let sealer = self.sealer;
            let seal = |text: &[u8], sealed: &mut [u8]| {
                let _span = trace::span("seal");
                sealer.seal_to(index, text, sealed)
            };
            let tag = match is_whole {
                true => copy(source, part, Some(&seal)),
                false => copy(source, part, None),
            };
            match tag {
                Some(Ok(tag)) => {
                    let number = (index - self.start / CHUNK_BYTES) as usize;
                    self.tags[number] = Some(tag);
                }
                Some(Err(error)) => _ = self.failed.get_or_insert(error),
                None => {}
            }
            offset += bytes as u64;
            source += bytes as u64;
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Dropped before the count changes: dropping the last reference waits for devices.
        self.sources = None;
        let mut state = self.staging_queue.lock();
        match self.is_stager {
            true => state.staging -= 1,
            false => state.filling -= 1,
        }
        // No other thread copies the extents that this claim gives up.
        if !self.numbers.is_empty() {
            state.end();
        }
        self.staging_queue.release_sources(state);
    }
}

/// Splits the first `bytes` off `rest`.
fn take<'a>(rest: &mut &'a mut [u8], bytes: usize) -> &'a mut [u8] {
    rest.split_off_mut(..bytes)
        .expect("the pieces of an extent add up to its length")
}

#[cfg(test)]
mod tests {
    use penstock_io::buffer::{Pool, Watch};
    use penstock_io::faulty::Lent;

    use super::*;
    use crate::plan::write::{ShardPlan, TensorSpec, WritePlan, plan};
    use crate::seal::{Block, DataKey, Sealing, ShardPlace};

    const EXTENT_BYTES: u64 = 2 << 20;

    fn sealers(plan: &WritePlan) -> Vec<ShardSealer> {
        let sealing = Sealing::new(Arc::new(DataKey::from_bytes(&[7; 32])), Vec::new());
        let sealer = |shard: &ShardPlan| {
            let place = ShardPlace {
                id: "0123456789abcdef0123456789abcdef",
                rank: 0,
                number: 0,
                file_bytes: shard.bytes,
                header_bytes: shard.header.len() as u64,
                chunk_bytes: CHUNK_BYTES,
            };
            ShardSealer::new(&sealing, &Block([9; 32]), &place)
        };
        plan.shards.iter().map(sealer).collect()
    }

    /// All extents as they are stored, with the tags, and the number of tags made while copying.
    fn copied(lent: &Lent, is_watched: bool, on_the_way: bool) -> (Vec<u8>, Vec<Tag>, usize) {
        let source = lent.region();
        let spec = TensorSpec {
            name: "t".to_owned(),
            dtype: "uint8".to_owned(),
            shape: vec![source.len()],
            item_bytes: 1,
            region: None,
            group: None,
        };
        let plan = Arc::new(plan(&[spec], u64::MAX, EXTENT_BYTES).unwrap());
        let sealers = sealers(&plan);
        let sources = Arc::new(vec![Region::from(source)]);
        let watch = is_watched.then(|| Watch::begin(Arc::clone(&sources), &[]).unwrap());
        let pool = Pool::new(EXTENT_BYTES as usize, 8 << 20);
        let queue = StagingQueue::new(Arc::clone(&plan), sources, watch, pool, true);
        let (mut bytes, mut tags, mut tags_made) = (Vec::new(), Vec::new(), 0);
        for number in 0..plan.extents() {
            let mut claim = queue.claim(1, false).unwrap();
            let given = if on_the_way { &sealers[..] } else { &[] };
            let filled = claim.copy(queue.pool.take().unwrap(), given).unwrap();
            let extent = plan.extent(number);
            let mut buf = filled.buf.wait().unwrap();
            let text = &mut buf.as_mut_slice()[..extent.bytes()];
            let first = extent.range.start / CHUNK_BYTES;
            for (index, chunk) in text.chunks_mut(CHUNK_BYTES as usize).enumerate() {
                let made = filled.tags.get(index).copied().flatten();
                tags_made += usize::from(made.is_some());
                let seal = || sealers[0].seal(first + index as u64, chunk).unwrap();
                tags.push(made.unwrap_or_else(seal));
            }
            bytes.extend_from_slice(text);
        }
        (bytes, tags, tags_made)
    }

    #[test]
    fn sealing_on_the_way_gives_what_sealing_in_place_gives() {
        // Its first chunk follows the header, and its last one is not whole.
        let lent = Lent::new(1, 5 * EXTENT_BYTES as usize / 16 + 999);
        let in_place = copied(&lent, false, false);
        let on_the_way = copied(&lent, false, true);
        assert_eq!(in_place.2, 0);
        assert_eq!(on_the_way.2, in_place.1.len() - 1);
        assert!(in_place.0 == on_the_way.0 && in_place.1 == on_the_way.1);
    }

    #[test]
    fn the_edges_of_a_watched_tensor_are_sealed_as_they_were() {
        let lent = Lent::new(1, 5 * EXTENT_BYTES as usize / 16 + 999);
        let sources = Arc::new(vec![Region::from(lent.region())]);
        if let Err(error) = Watch::begin(sources, &[]) {
            return eprintln!("skipped: the kernel does not watch memory: {error}");
        }
        let in_place = copied(&lent, true, false);
        let on_the_way = copied(&lent, true, true);
        assert!(on_the_way.2 > 0 && on_the_way.2 < in_place.1.len());
        assert!(in_place.0 == on_the_way.0 && in_place.1 == on_the_way.1);
    }
}
