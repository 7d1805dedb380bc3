//! Calls to the kernel: `userfaultfd`, and `PAGEMAP_SCAN`.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use rustix::ioctl::{Opcode, Updater, ioctl, opcode};
use rustix::mm::{UserfaultfdFlags, userfaultfd};

use super::unwatchable::{Unwatchable, refused};

/// The two files that the calls go through.
pub(super) struct Kernel {
    userfault: OwnedFd,
    pagemap: File,
}

/// `UFFD_USER_MODE_ONLY`: needs no privilege. As no messages are used, none of the kernel's own
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
/// `PAGE_IS_HUGE`.
const IS_HUGE: u64 = 1 << 6;

/// `struct uffdio_api`, and `struct uffdio_writeprotect`, whose fields have other names.
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
    pub(super) fn open() -> Result<Kernel, Unwatchable> {
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

    pub(super) fn register(&self, pages: &Range<usize>) -> Result<(), Unwatchable> {
        let mut argument = Register([pages.start as u64, pages.len() as u64, MODE_WP, 0]);
        // SAFETY: the number and the structure are those of `UFFDIO_REGISTER`.
        let done = unsafe { call::<UFFDIO_REGISTER, _>(&self.userfault, &mut argument) };
        done.map_err(refused("UFFDIO_REGISTER"))
    }

    pub(super) fn protect(&self, pages: &Range<usize>) -> Result<(), Unwatchable> {
        let mut argument = Words([pages.start as u64, pages.len() as u64, PROTECT]);
        // SAFETY: the number and the structure are those of `UFFDIO_WRITEPROTECT`.
        let done = unsafe { call::<UFFDIO_WRITEPROTECT, _>(&self.userfault, &mut argument) };
        done.map_err(refused("UFFDIO_WRITEPROTECT"))
    }

    /// Also lifts the protection. Memory that is no longer mapped needs neither.
    pub(super) fn unregister(&self, pages: &Range<usize>) -> rustix::io::Result<()> {
        let mut argument = Addresses([pages.start as u64, pages.len() as u64]);
        // SAFETY: the number and the structure are those of `UFFDIO_UNREGISTER`.
        unsafe { call::<UFFDIO_UNREGISTER, _>(&self.userfault, &mut argument) }
    }

    /// The first run of pages among these that were written to.
    pub(super) fn find_written(&self, pages: &Range<usize>) -> io::Result<Option<Range<usize>>> {
        scan(&self.pagemap, pages, CHECK_WATCHED, IS_WRITTEN)
    }
}

/// The first run of pages among these that are parts of huge pages.
pub(super) fn find_huge(pagemap: &File, pages: &Range<usize>) -> io::Result<Option<Range<usize>>> {
    scan(pagemap, pages, 0, IS_HUGE)
}

/// The first run of pages among these that are of a category.
fn scan(
    pagemap: &File,
    pages: &Range<usize>,
    flags: u64,
    category: u64,
) -> io::Result<Option<Range<usize>>> {
    let mut found = PageRegion::default();
    let mut start = pages.start as u64;
    while start < pages.end as u64 {
        let mut scan = Scan {
            size: size_of::<Scan>() as u64,
            flags,
            start,
            end: pages.end as u64,
            walk_end: 0,
            vec: (&raw mut found).expose_provenance() as u64,
            vec_len: 1,
            max_pages: 0,
            category_inverted: 0,
            category_mask: category,
            category_anyof_mask: 0,
            return_mask: category,
        };
        // SAFETY: the number and the structure are those of `PAGEMAP_SCAN`, and there is room for
        // one region at `vec`.
        unsafe { call::<PAGEMAP_SCAN, _>(pagemap, &mut scan) }?;
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

/// Calls `ioctl` with a structure, again after an interruption.
///
/// # Safety
/// `T` is the structure that the number stands for.
unsafe fn call<const NUMBER: Opcode, T>(fd: impl AsFd, argument: &mut T) -> rustix::io::Result<()> {
    loop {
        // SAFETY: this function's caller promises it.
        let updater = unsafe { Updater::<NUMBER, T>::new(&mut *argument) };
        // SAFETY: as above; the kernel reads and writes the structure and nothing else of this
        // process.
        match unsafe { ioctl(&fd, updater) } {
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
            done => return done,
        }
    }
}
