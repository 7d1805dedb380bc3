//! Whether anybody writes to memory that is lent: asked of the kernel, which misses nobody.
//!
//! A [`Watch`] has the pages of regions protected against writing (`userfaultfd`, asynchronous mode).
//! The first write to a page lifts the protection of that page, and the kernel remembers it
//! (`PAGEMAP_SCAN`): the writer notices nothing but half a microsecond. So it does not matter who
//! writes, in which language, or whether the write is still going on. What was copied out of pages
//! that nobody has written to since the watch began is what was there when it began: a byte that was
//! copied new was written before it was copied.
//!
//! The bytes before the first whole page of a region, and behind the last, share their pages with
//! memory of others. They are kept, and put over what is copied of them later ([`Edges`]).
//!
//! Writes that take no page table of this process are not seen: those of other processes, and of
//! devices. Memory that is mapped for several processes is therefore refused, and so is memory with a
//! file behind it, even if it is private: its pages are the file's until this process writes to them.

#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::process;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread;

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};
use rustix::param::page_size;

use super::HostRegion;

/// Gaps between pages up to this size are registered with them. Only the pages are protected, so that
/// costs no more than a walk over the gap in the end, and no mapping.
const GAP_BYTES_MAX: usize = 4 << 20;
/// Where what is registered begins or ends within a mapping, it is split there, and a process may
/// have 65,530 of them (`vm.max_map_count`): so much of that is ours.
const SPLITS_MAX: usize = 16_384;
/// What a thread protects at once.
const PROTECT_BYTES: usize = 64 << 20;
const PROTECT_THREADS_MAX: usize = 4;

/// Why regions cannot be watched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Unwatchable {
    /// The system lacks what it takes, or does not allow it.
    #[error("the kernel does not tell of writes here ({what}: {source})")]
    Refused {
        /// What was asked of it.
        what: &'static str,
        /// Its answer.
        source: io::Error,
    },
    /// A process has one watch at a time.
    #[error("another state is watched at the moment")]
    Busy,
    /// Others could write to it unseen.
    #[error("memory that several processes share")]
    Shared {
        /// Index of the region.
        region: usize,
    },
    /// Its pages that nobody has written to change with the file.
    #[error("memory that a file is mapped to, which others may write to")]
    Mapped {
        /// Index of the region.
        region: usize,
    },
    /// It would take too many of the mappings that the process may have.
    #[error("memory in too many places")]
    Scattered,
}

/// Memory in which writes are noticed until this is dropped.
pub struct Watch {
    /// Held, so that the addresses stand for the same memory all the time.
    regions: Arc<Vec<HostRegion>>,
    /// Whole pages of regions, without overlaps, by address.
    pages: Vec<Range<usize>>,
    edges: Arc<Edges>,
    kernel: Kernel,
    /// What is registered of the mappings that they lie in.
    registered: Vec<Range<usize>>,
    turn: Turn,
}

/// What lay in the pages that are not a region's alone when a [`Watch`] began, by region.
#[derive(Default)]
pub struct Edges(Vec<Edge>);

impl Edges {
    /// Puts it over a copy of a region's content from byte `start` on.
    pub fn put_over(&self, index: usize, region: &HostRegion, start: u64, copy: &mut [u8]) {
        let first = self.0.partition_point(|edge| edge.region < index);
        for edge in self.0[first..]
            .iter()
            .take_while(|edge| edge.region == index)
        {
            region.overlay(start, copy, edge.address, &edge.bytes);
        }
    }
}

/// Bytes of a page that is not a region's alone, as they were.
struct Edge {
    region: usize,
    address: usize,
    bytes: Vec<u8>,
}

impl Watch {
    /// Watches the regions, all but those of the indices in `without`, which ascend.
    ///
    /// # Errors
    /// Why that is not possible: nothing is watched then.
    pub fn begin(regions: Arc<Vec<HostRegion>>, without: &[usize]) -> Result<Watch, Unwatchable> {
        let turn = Turn::take().ok_or(Unwatchable::Busy)?;
        let mappings = mappings()?;
        let watched = |index: &usize| without.binary_search(index).is_err();
        let mut pages = Vec::new();
        for index in (0..regions.len()).filter(watched) {
            let span = regions[index].span();
            for mapping in within(&mappings, &span) {
                match mapping.kind {
                    MappingKind::Anonymous => {}
                    MappingKind::Shared => return Err(Unwatchable::Shared { region: index }),
                    MappingKind::File => return Err(Unwatchable::Mapped { region: index }),
                }
            }
            pages.extend(Some(whole_pages(&span)).filter(|pages| !pages.is_empty()));
        }
        let pages = merged(pages);
        let ranges = to_register(&pages, &mappings).ok_or(Unwatchable::Scattered)?;
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
        // Later than the protection, so that a write in between is in them.
        let indices = (0..watch.regions.len()).filter(watched);
        let edges = indices.flat_map(|index| watch.edges_of(index)).collect();
        watch.edges = Arc::new(Edges(edges));
        Ok(watch)
    }

    fn protect(&self) -> Result<(), Unwatchable> {
        // Nine milliseconds for each GiB of small pages, which threads share out well.
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

    /// What copies of the regions need to be those of the moment at which the watch began.
    pub fn edges(&self) -> Arc<Edges> {
        Arc::clone(&self.edges)
    }

    /// A region that was written to since the watch began, but for its edges, if there is one. It may
    /// be one that only has a page in common with what was.
    pub fn find_written(&self) -> Option<usize> {
        self.pages.iter().find_map(|pages| self.find_within(pages))
    }

    fn find_within(&self, pages: &Range<usize>) -> Option<usize> {
        // Where the kernel does not say, as of memory that was mapped anew, nothing is certain.
        let written = match self.kernel.find_written(pages) {
            Ok(None) => return None,
            Ok(Some(written)) => written,
            Err(_) => pages.clone(),
        };
        let is_hit = |region: &HostRegion| overlaps(&written, &region.span());
        self.regions.iter().position(is_hit)
    }

    /// What a region has in pages that are not its alone.
    fn edges_of(&self, index: usize) -> Vec<Edge> {
        let span = self.regions[index].span();
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
        // SAFETY: an edge lies between two items of a region that the watch holds, and in a page
        // with one of them, which is readable: so all of the page is. The copy may be torn where
        // somebody writes, as that of a region.
        unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
        bytes
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // What the descriptor of a fork acts on is the memory of its parent.
        if self.turn.is_ours() {
            for range in &self.registered {
                // Refused as a whole where others have mapped something else into a gap since.
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

/// The right of one watch of a process: the protection by a second one would wipe out what the
/// kernel knows for the first.
struct Turn {
    process: u32,
}

static TURN: AtomicU32 = AtomicU32::new(0);

impl Turn {
    fn take() -> Option<Turn> {
        let process = process::id();
        let holder = TURN.load(Ordering::Relaxed);
        // Whatever watch a fork has a copy of is its parent's.
        let is_free = holder != process;
        let swapped = is_free
            && TURN
                .compare_exchange(holder, process, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        swapped.then_some(Turn { process })
    }

    fn is_ours(&self) -> bool {
        self.process == process::id()
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.is_ours() {
            TURN.store(0, Ordering::Release);
        }
    }
}

fn whole_pages(span: &Range<usize>) -> Range<usize> {
    let page_bytes = page_size();
    let start = span.start.next_multiple_of(page_bytes);
    let end = span.end - span.end % page_bytes;
    start..end.max(start)
}

fn overlaps(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// The same pages, by address, each once.
fn merged(mut pages: Vec<Range<usize>>) -> Vec<Range<usize>> {
    pages.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::with_capacity(pages.len());
    for range in pages {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// What to register so that the pages can be protected: whole mappings where that is little more, as
/// it splits none. `None` where too many would be split.
fn to_register(pages: &[Range<usize>], mappings: &[Mapping]) -> Option<Vec<Range<usize>>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut splits = 0;
    for mapping in mappings {
        let Range { start, end } = mapping.range;
        let first = pages.partition_point(|pages| pages.end <= start);
        let pages = pages[first..].iter().take_while(|pages| pages.start < end);
        let mut own: Vec<Range<usize>> = Vec::new();
        for pages in pages {
            let pages = pages.start.max(start)..pages.end.min(end);
            match own.last_mut() {
                Some(last) if pages.start - last.end <= GAP_BYTES_MAX => last.end = pages.end,
                None if pages.start - start <= GAP_BYTES_MAX => own.push(start..pages.end),
                _ => own.push(pages),
            }
        }
        if let Some(last) = own
            .last_mut()
            .filter(|last| end - last.end <= GAP_BYTES_MAX)
        {
            last.end = end;
        }
        let cuts = own
            .iter()
            .map(|own| usize::from(own.start > start) + usize::from(own.end < end));
        splits += cuts.sum::<usize>();
        ranges.append(&mut own);
    }
    (splits <= SPLITS_MAX).then_some(ranges)
}

/// Memory of this process.
#[derive(Debug, PartialEq)]
struct Mapping {
    range: Range<usize>,
    kind: MappingKind,
}

#[derive(Debug, PartialEq)]
enum MappingKind {
    /// Nobody but this process reaches it.
    Anonymous,
    Shared,
    File,
}

/// By address.
fn mappings() -> Result<Vec<Mapping>, Unwatchable> {
    let maps = fs::read("/proc/self/maps").map_err(refused("/proc/self/maps"))?;
    let maps = String::from_utf8_lossy(&maps);
    Ok(maps.lines().filter_map(mapping).collect())
}

/// That of a line such as `7f00-7f10 rw-s 00000000 00:01 1024 /dev/zero (deleted)`.
fn mapping(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text: &str| usize::from_str_radix(text, 16).ok();
    let range = address(start)?..address(end)?;
    let is_shared = words.next()?.ends_with('s');
    // What has an inode has a file behind it; of memory without one both numbers are zero.
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

/// The mappings that a range of addresses lies in.
fn within<'a>(mappings: &'a [Mapping], span: &Range<usize>) -> impl Iterator<Item = &'a Mapping> {
    let first = mappings.partition_point(|mapping| mapping.range.end <= span.start);
    let end = span.end;
    mappings[first..]
        .iter()
        .take_while(move |mapping| mapping.range.start < end)
}

fn refused<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Unwatchable {
    move |error| Unwatchable::Refused {
        what,
        source: error.into(),
    }
}

/// The two files through which the kernel is asked.
struct Kernel {
    userfault: OwnedFd,
    pagemap: File,
}

/// `UFFD_USER_MODE_ONLY`: what needs no privilege. Without messages, none of the kernel's own
/// accesses ever waits for one.
const USER_MODE_ONLY: u32 = 1;
/// `UFFD_API`.
const API: u64 = 0xaa;
/// `UFFD_FEATURE_WP_UNPOPULATED | UFFD_FEATURE_WP_ASYNC`, of Linux 6.7.
const FEATURES: u64 = 1 << 13 | 1 << 15;
/// `UFFDIO_REGISTER_MODE_WP`.
const MODE_WP: u64 = 1 << 1;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const PROTECT: u64 = 1;
/// `PM_SCAN_CHECK_WPASYNC`: an error where memory is not watched.
const CHECK_WATCHED: u64 = 1 << 1;
/// `PAGE_IS_WRITTEN`.
const IS_WRITTEN: u64 = 1 << 1;

/// `struct uffdio_api`, and `struct uffdio_writeprotect` with other names.
#[repr(C)]
struct Words([u64; 3]);

/// `struct uffdio_range`.
#[repr(C)]
struct Addresses([u64; 2]);

/// `struct uffdio_register`.
#[repr(C)]
struct Register([u64; 4]);

/// `struct page_region`.
#[repr(C)]
#[derive(Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const UFFDIO_API: Opcode = opcode::read_write::<Words>(0xaa, 0x3f);
const UFFDIO_REGISTER: Opcode = opcode::read_write::<Register>(0xaa, 0x00);
const UFFDIO_UNREGISTER: Opcode = opcode::read::<Addresses>(0xaa, 0x01);
const UFFDIO_WRITEPROTECT: Opcode = opcode::read_write::<Words>(0xaa, 0x06);
const PAGEMAP_SCAN: Opcode = opcode::read_write::<Scan>(b'f', 16);

impl Kernel {
    fn open() -> Result<Kernel, Unwatchable> {
        let flags = UserfaultfdFlags::CLOEXEC
            | UserfaultfdFlags::NONBLOCK
            | UserfaultfdFlags::from_bits_retain(USER_MODE_ONLY);
        // SAFETY: the descriptor stays in this file, which registers memory for protection in the
        // asynchronous mode only: no access to it ever waits, and no content changes.
        let userfault = unsafe { userfaultfd(flags) }.map_err(refused("userfaultfd"))?;
        let pagemap = File::open("/proc/self/pagemap").map_err(refused("/proc/self/pagemap"))?;
        let kernel = Kernel { userfault, pagemap };
        let mut api = Words([API, FEATURES, 0]);
        // SAFETY: the number and the structure are those of `UFFDIO_API`.
        let asked = unsafe { call::<UFFDIO_API, _>(&kernel.userfault, &mut api) };
        asked.map_err(refused("asynchronous write protection, of Linux 6.7"))?;
        Ok(kernel)
    }

    fn register(&self, pages: &Range<usize>) -> Result<(), Unwatchable> {
        let mut argument = Register([pages.start as u64, pages.len() as u64, MODE_WP, 0]);
        // SAFETY: the number and the structure are those of `UFFDIO_REGISTER`.
        let done = unsafe { call::<UFFDIO_REGISTER, _>(&self.userfault, &mut argument) };
        done.map_err(refused("UFFDIO_REGISTER"))
    }

    fn protect(&self, pages: &Range<usize>) -> Result<(), Unwatchable> {
        let mut argument = Words([pages.start as u64, pages.len() as u64, PROTECT]);
        // SAFETY: the number and the structure are those of `UFFDIO_WRITEPROTECT`.
        let done = unsafe { call::<UFFDIO_WRITEPROTECT, _>(&self.userfault, &mut argument) };
        done.map_err(refused("UFFDIO_WRITEPROTECT"))
    }

    /// Also lifts the protection. What is not mapped any more needs none of that.
    fn unregister(&self, pages: &Range<usize>) -> rustix::io::Result<()> {
        let mut argument = Addresses([pages.start as u64, pages.len() as u64]);
        // SAFETY: the number and the structure are those of `UFFDIO_UNREGISTER`.
        unsafe { call::<UFFDIO_UNREGISTER, _>(&self.userfault, &mut argument) }
    }

    /// Pages within these that were written to, the first of them.
    fn find_written(&self, pages: &Range<usize>) -> io::Result<Option<Range<usize>>> {
        let mut found = PageRegion::default();
        let mut start = pages.start as u64;
        while start < pages.end as u64 {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                flags: CHECK_WATCHED,
                start,
                end: pages.end as u64,
                walk_end: 0,
                vec: (&raw mut found).expose_provenance() as u64,
                vec_len: 1,
                max_pages: 0,
                category_inverted: 0,
                category_mask: IS_WRITTEN,
                category_anyof_mask: 0,
                return_mask: IS_WRITTEN,
            };
            // SAFETY: the number and the structure are those of `PAGEMAP_SCAN`, and there is room
            // for one region at `vec`.
            unsafe { call::<PAGEMAP_SCAN, _>(&self.pagemap, &mut scan) }?;
            if found.end > 0 {
                return Ok(Some(found.start as usize..found.end as usize));
            }
            if scan.walk_end <= start {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            start = scan.walk_end;
        }
        Ok(None)
    }
}

/// # Safety
/// `T` is the structure that the number stands for.
unsafe fn call<const NUMBER: Opcode, T>(fd: impl AsFd, argument: &mut T) -> rustix::io::Result<()> {
    loop {
        // SAFETY: as this function's caller says.
        let updater = unsafe { Updater::<NUMBER, T>::new(&mut *argument) };
        // SAFETY: as above; the kernel reads and writes the structure and nothing else of ours.
        match unsafe { ioctl(&fd, updater) } {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Memory whose bytes are changed behind the back of its regions.
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

    /// One test at a time has the turn.
    fn alone() -> std::sync::MutexGuard<'static, ()> {
        static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
        ALONE
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// `None` with a message where the kernel cannot.
    fn watch(regions: Vec<HostRegion>, without: &[usize]) -> Option<Watch> {
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
            watch.regions[1].copy_to(0, &mut copy);
            watch.edges().put_over(1, &watch.regions[1], 0, &mut copy);
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
        let second = || Watch::begin(Arc::new(vec![HostRegion::from(vec![1; MIB])]), &[]);
        assert!(matches!(second(), Err(Unwatchable::Busy)));
        drop(first);
        second().unwrap();
        // Regions that lie in each other are one piece of memory.
        let regions = vec![lent.region(0..MIB), lent.region(5..MIB / 2)];
        let watch = watch(regions, &[]).unwrap();
        lent.write(MIB / 4);
        assert!(watch.find_written().is_some());
    }

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

    /// The limit on mappings is the process's: what came next would fail for want of one.
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

    #[test]
    fn what_is_registered_splits_few_mappings_or_it_is_refused() {
        let anonymous = |range| Mapping {
            range,
            kind: MappingKind::Anonymous,
        };
        // The end of one, a gap that is too large, and all of the next.
        let apart = 100 * MIB;
        let two = [anonymous(MIB..200 * MIB), anonymous(200 * MIB..201 * MIB)];
        let pages = [2 * MIB..3 * MIB, apart..apart + MIB, 199 * MIB..201 * MIB];
        let expected = [MIB..3 * MIB, apart..apart + MIB, 199 * MIB..200 * MIB];
        let found = to_register(&pages, &two).unwrap();
        assert_eq!(found[..3], expected);
        assert_eq!(found[3], 200 * MIB..201 * MIB);
        assert_eq!(found.len(), 4);
        let one = [anonymous(0..1 << 40)];
        let scattered = |count: usize| -> Vec<Range<usize>> {
            let place = |index: usize| (index + 1) * 8 * MIB;
            (0..count)
                .map(|index| place(index)..place(index) + MIB)
                .collect()
        };
        let most = SPLITS_MAX / 2;
        assert_eq!(to_register(&scattered(most), &one).unwrap().len(), most);
        assert_eq!(to_register(&scattered(most + 1), &one), None);
    }

    #[test]
    fn pages_that_touch_are_one_range() {
        let page = page_size();
        assert_eq!(merged(vec![5..9, 0..3, 3..4, 6..7]), [0..4, 5..9]);
        assert_eq!(whole_pages(&(1..3 * page - 1)), page..2 * page);
        assert!(whole_pages(&(page + 1..page + 9)).is_empty());
        assert_eq!(whole_pages(&(page..page)), page..page);
    }
}
