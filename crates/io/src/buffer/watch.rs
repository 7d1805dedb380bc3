//! Detects writes to lent memory, through the kernel, which misses none.
//!
//! A [`Watch`] write-protects the pages of regions (`userfaultfd`, asynchronous mode). The first
//! write to a page lifts the protection of that page, and the kernel records it (`PAGEMAP_SCAN`):
//! the writer only loses half a microsecond. So it does not matter who writes, in which language,
//! or whether the write is still in progress. If nobody has written to a page since the watch
//! began, every copy of it made since equals its content at that moment: a byte that was copied new
//! was written before it was copied.
//!
//! The bytes before the first whole page of a region, and behind the last, share their pages with
//! other memory. They are saved when the watch begins, and put over later copies ([`Edges`]).
//!
//! Writes that bypass the page table of this process go unnoticed: those of other processes, and of
//! devices. Memory that several processes map is therefore refused, and so is memory with a file
//! behind it, even if it is private: its pages are the file's until this process writes to them.

#![allow(unsafe_code)]

mod edges;
mod huge;
mod kernel;
mod mapping;
mod pages;
mod turn;
mod unwatchable;

use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::param::page_size;

use super::{HostRegion, Region};
use edges::Edge;
pub use edges::Edges;
pub use huge::HugePages;
use kernel::Kernel;
use mapping::{Mapping, MappingKind, mappings, within};
use pages::{merged, overlaps, to_register, whole_pages};
use turn::Turn;
pub use unwatchable::Unwatchable;
use unwatchable::refused;

/// Bytes that a thread protects by one call.
const PROTECT_BYTES: usize = 64 << 20;
const PROTECT_THREADS_MAX: usize = 4;

/// Memory in which writes are detected, until this is dropped.
pub struct Watch {
    /// Held, so that the addresses keep meaning the same memory.
    regions: Arc<Vec<Region>>,
    /// Whole pages of regions, without overlaps, by address.
    pages: Vec<Range<usize>>,
    edges: Arc<Edges>,
    kernel: Kernel,
    /// The registered ranges of the mappings around the pages.
    registered: Vec<Range<usize>>,
    turn: Turn,
}

impl Watch {
    /// Watches the host regions, except those whose indices are in `without`, in ascending order.
    ///
    /// # Errors
    /// The reason it is not possible; nothing is watched then.
    pub fn begin(regions: Arc<Vec<Region>>, without: &[usize]) -> Result<Watch, Unwatchable> {
        let turn = Turn::take().ok_or(Unwatchable::Busy)?;
        let mappings = mappings()?;
        let watched = |&index: &usize| {
            regions[index].host().is_some() && without.binary_search(&index).is_err()
        };
        let watched: Vec<usize> = (0..regions.len()).filter(watched).collect();
        for &index in &watched {
            match kind_of(&regions[index], &mappings) {
                MappingKind::Anonymous => {}
                MappingKind::Shared => return Err(Unwatchable::Shared { region: index }),
                MappingKind::File => return Err(Unwatchable::Mapped { region: index }),
            }
        }
        Watch::of(regions, &watched, &mappings, turn)
    }

    /// Watches as many of the `wanted` host regions as can be watched, and returns their indices.
    ///
    /// # Errors
    /// As those of [`begin`](Watch::begin).
    pub fn begin_where_possible(
        regions: Arc<Vec<Region>>,
        mut wanted: Vec<usize>,
    ) -> Result<(Watch, Vec<usize>), Unwatchable> {
        let turn = Turn::take().ok_or(Unwatchable::Busy)?;
        let mappings = mappings()?;
        wanted.retain(|&index| kind_of(&regions[index], &mappings) == MappingKind::Anonymous);
        let watch = Watch::of(regions, &wanted, &mappings, turn)?;
        Ok((watch, wanted))
    }

    fn of(
        regions: Arc<Vec<Region>>,
        watched: &[usize],
        mappings: &[Mapping],
        turn: Turn,
    ) -> Result<Watch, Unwatchable> {
        let pages = watched
            .iter()
            .map(|&index| whole_pages(&span_of(&regions[index])));
        let pages = merged(pages.filter(|pages| !pages.is_empty()).collect());
        let ranges = to_register(&pages, mappings).ok_or(Unwatchable::Scattered)?;
        let mut watch = Watch {
            pages,
            edges: Arc::default(),
            kernel: Kernel::open()?,
            registered: Vec::with_capacity(ranges.len()),
            turn,
            regions,
        };
        for range in ranges {
            watch.kernel.register(&range)?;
            watch.registered.push(range);
        }
        watch.protect()?;
        // Read after protecting, so that a write in between is in the edges.
        let edges = watched.iter().flat_map(|&index| watch.edges_of(index));
        watch.edges = Arc::new(Edges(edges.collect()));
        Ok(watch)
    }

    /// Checks that the kernel can detect writes here, by watching a little memory.
    ///
    /// # Errors
    /// The reason it cannot.
    pub fn probe() -> Result<(), Unwatchable> {
        let memory = vec![0; 4 * page_size()];
        let watch = match Watch::begin(Arc::new(vec![HostRegion::from(memory).into()]), &[]) {
            // Another watch is running, so the kernel can.
            Err(Unwatchable::Busy) => return Ok(()),
            watch => watch?,
        };
        for pages in &watch.pages {
            let written = watch.kernel.find_written(pages);
            written.map_err(refused("PAGEMAP_SCAN"))?;
        }
        Ok(())
    }

    /// The part of a range of contiguous content that a watch protects, cut at multiples of
    /// `step_bytes` from the start of the range; empty if there is none.
    pub fn protectable(region: &HostRegion, range: &Range<u64>, step_bytes: u64) -> Range<u64> {
        let span = region.span();
        let pages = whole_pages(&span);
        let first = pages.start.saturating_sub(span.start) as u64;
        let end = pages.end.saturating_sub(span.start) as u64;
        let skipped = first.saturating_sub(range.start);
        let start = range.start + skipped.next_multiple_of(step_bytes);
        let bytes = range.end.min(end).saturating_sub(start);
        start..start + bytes - bytes % step_bytes
    }

    fn protect(&self) -> Result<(), Unwatchable> {
        // Protecting takes nine milliseconds per GiB of small pages; threads share it well.
        let bytes: usize = self.pages.iter().map(Range::len).sum();
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(PROTECT_THREADS_MAX).min(bytes / PROTECT_BYTES);
        let cuts = self.pages.iter().flat_map(|pages| {
            let starts = pages.clone().step_by(PROTECT_BYTES);
            starts.map(|start| start..pages.end.min(start + PROTECT_BYTES))
        });
        let cuts: Vec<Range<usize>> = cuts.collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(pages) = cuts.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.kernel.protect(pages)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let help = |_| thread::Builder::new().spawn_scoped(scope, work);
            // Where the system has no more threads to give, fewer do the work.
            let helpers: Vec<_> = (1..threads).map_while(|index| help(index).ok()).collect();
            let own = work();
            let join = |helper: thread::ScopedJoinHandle<'_, _>| {
                let joined = helper.join();
                joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            helpers.into_iter().map(join).chain([own]).collect()
        })
    }

    /// Bytes that turn later copies of the regions into copies of the moment at which the watch
    /// began.
    pub fn edges(&self) -> Arc<Edges> {
        Arc::clone(&self.edges)
    }

    /// A region that was written to since the watch began, edges aside, if there is one. It may be
    /// one that only shares a page with the written one.
    pub fn find_written(&self) -> Option<usize> {
        self.pages.iter().find_map(|pages| self.find_within(pages))
    }

    /// Whether a page with one of these addresses, all of which are protected, was written to since
    /// the watch began.
    pub fn is_written(&self, addresses: &Range<usize>) -> bool {
        let page_bytes = page_size();
        let start = addresses.start - addresses.start % page_bytes;
        let pages = start..addresses.end.next_multiple_of(page_bytes);
        // Where the kernel gives no answer, a write must be assumed.
        !matches!(self.kernel.find_written(&pages), Ok(None))
    }

    fn find_within(&self, pages: &Range<usize>) -> Option<usize> {
        // Where the kernel gives no answer, as for memory that was mapped anew, a write must be
        // assumed.
        let written = match self.kernel.find_written(pages) {
            Ok(None) => return None,
            Ok(Some(written)) => written,
            Err(_) => pages.clone(),
        };
        let is_hit = |region: &Region| overlaps(&written, &span_of(region));
        self.regions.iter().position(is_hit)
    }

    /// Reads the bytes of a region in pages that it shares with other memory.
    fn edges_of(&self, index: usize) -> Vec<Edge> {
        let span = span_of(&self.regions[index]);
        let pages = whole_pages(&span);
        let parts = match pages.is_empty() {
            true => [span, 0..0],
            false => [span.start..pages.start, pages.end..span.end],
        };
        let edge = |part: Range<usize>| Edge {
            region: index,
            address: part.start,
            bytes: self.read(part.start, part.len()),
        };
        let parts = parts.into_iter().filter(|part| !part.is_empty());
        parts.map(edge).collect()
    }

    /// Copies bytes of an edge.
    fn read(&self, address: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let from: *const u8 = ptr::with_exposed_provenance(address);
        // SAFETY: an edge is between two items of a region that the watch holds, and in a page with
        // one of them, which is readable: so the whole page is. The copy may be torn where somebody
        // writes, as that of a region may be.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
        bytes
    }
}

/// The addresses of a host region; an empty range for a device's.
fn span_of(region: &Region) -> Range<usize> {
    region.host().map_or(0..0, HostRegion::span)
}

/// The kind of mapping of a region; of several kinds, one that is not anonymous.
fn kind_of(region: &Region, mappings: &[Mapping]) -> MappingKind {
    let span = span_of(region);
    let mut kinds = within(mappings, &span).map(|mapping| mapping.kind);
    let other = kinds.find(|kind| *kind != MappingKind::Anonymous);
    other.unwrap_or(MappingKind::Anonymous)
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The descriptor inherited by a fork acts on the memory of its parent.
        if self.turn.is_ours() {
            for range in &self.registered {
                // Fails as a whole if something else was mapped into a gap since.
                if self.kernel.unregister(range).is_err() {
                    for pages in self.pages.iter().filter(|pages| overlaps(pages, range)) {
                        let _ = self.kernel.unregister(pages);
                    }
                }
            }
        }
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch")
            .field("pages", &self.pages.len())
            .field("edges", &self.edges.0.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Memory whose bytes change behind its regions' backs.
    struct Lent(Vec<u8>);

    impl Lent {
        fn region(&mut self, range: Range<usize>) -> HostRegion {
            let address = self.0[range.clone()].as_mut_ptr().expose_provenance();
            // SAFETY: a test keeps the memory longer than its regions.
            unsafe { HostRegion::contiguous(address, range.len(), Box::new(())) }
        }

        fn write(&mut self, place: usize) {
            let byte = &raw mut self.0[place];
            // SAFETY: the place was just found to be there.
            unsafe { byte.write_volatile(1) };
        }
    }

    /// Only one watch can run at a time, so only one test.
    fn alone() -> std::sync::MutexGuard<'static, ()> {
        static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        ALONE
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// `None`, with a message, where the kernel cannot watch.
    fn watch(regions: Vec<HostRegion>, without: &[usize]) -> Option<Watch> {
        let regions = regions.into_iter().map(Region::from).collect();
        match Watch::begin(Arc::new(regions), without) {
            Err(error @ Unwatchable::Refused { .. }) => {
                eprintln!("skipped: {error}");
                None
            }
            watch => Some(watch.unwrap()),
        }
    }

    #[test]
    fn every_byte_of_a_region_is_watched_and_none_beside_it() {
        let _alone = alone();
        let mut lent = Lent(vec![0; 3 * MIB]);
        let inside = MIB + 77..2 * MIB + 1234;
        let middle = MIB + MIB / 2;
        for (place, is_inside, is_edge) in [
            (inside.start - 1, false, false),
            (inside.start, true, true),
            (inside.start + 5000, true, false),
            (middle, true, false),
            (inside.end - 1, true, true),
            (inside.end, false, false),
        ] {
            let region = lent.region(inside.clone());
            let Some(watch) = watch(vec![HostRegion::from(vec![7; MIB]), region], &[]) else {
                return;
            };
            assert_eq!(watch.find_written(), None);
            lent.write(place);
            let found = watch.find_written();
            let mut copy = vec![9; inside.len()];
            let region = watch.regions[1].host().unwrap();
            region.copy_to(0, &mut copy);
            watch.edges().put_over(1, region, 0, &mut copy);
            let is_whole = copy.iter().all(|&byte| byte == 0);
            assert_eq!(
                (found, is_whole),
                if is_inside && !is_edge {
                    (Some(1), false)
                } else {
                    (None, true)
                },
                "{place}"
            );
            drop(watch);
            lent.0[place] = 0;
        }
    }

    #[test]
    fn what_can_be_watched_is_reported_beforehand_and_also_meanwhile() {
        let _alone = alone();
        let mut lent = Lent(vec![0; MIB]);
        let is_refused = Watch::probe().is_err();
        let watch = watch(vec![lent.region(0..MIB)], &[]);
        assert_eq!(is_refused, watch.is_none());
        assert_eq!(is_refused, Watch::probe().is_err());
        assert!(watch.is_none_or(|watch| watch.find_written().is_none()));
    }

    #[test]
    fn what_is_left_out_is_not_watched() {
        let _alone = alone();
        let mut lent = Lent(vec![0; 4 * MIB]);
        let regions = vec![lent.region(0..2 * MIB), lent.region(2 * MIB..4 * MIB)];
        let Some(watch) = watch(regions, &[0]) else {
            return;
        };
        lent.write(MIB);
        assert_eq!(watch.find_written(), None);
        lent.write(3 * MIB);
        assert_eq!(watch.find_written(), Some(1));
    }

    #[test]
    fn a_second_watch_has_to_wait_for_the_end_of_the_first() {
        let _alone = alone();
        let mut lent = Lent(vec![0; MIB]);
        let Some(first) = watch(vec![lent.region(0..MIB)], &[]) else {
            return;
        };
        let second = || Watch::begin(Arc::new(vec![HostRegion::from(vec![1; MIB]).into()]), &[]);
        assert!(matches!(second(), Err(Unwatchable::Busy)));
        drop(first);
        second().unwrap();
        // Regions that lie in each other are one piece of memory.
        let regions = vec![lent.region(0..MIB), lent.region(5..MIB / 2)];
        let watch = watch(regions, &[]).unwrap();
        lent.write(MIB / 4);
        assert!(watch.find_written().is_some());
    }

    /// The limit on mappings is per process: later tests would fail for lack of mappings.
    #[test]
    fn many_regions_cost_few_mappings() {
        const COUNT: usize = 3000;
        let _alone = alone();
        let mut lent = Lent(vec![0; COUNT * 90_000]);
        let place = |index: usize| index * 90_000 + 50..index * 90_000 + 80_050;
        let regions = (0..COUNT).map(|index| lent.region(place(index))).collect();
        let before = mappings().unwrap().len();
        let Some(watch) = watch(regions, &[]) else {
            return;
        };
        let more = mappings().unwrap().len().saturating_sub(before);
        assert!(more < 200, "{more} mappings more");
        lent.write(place(7).end + 4500);
        assert_eq!(watch.find_written(), None);
        lent.write(place(2000).start + 40_000);
        assert_eq!(watch.find_written(), Some(2000));
    }
}
