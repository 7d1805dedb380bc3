//! Direct I/O: whether it is wanted, and the alignment that it needs.

use std::fmt;
use std::os::fd::OwnedFd;
use std::str::FromStr;

use rustix::fs::{AtFlags, Statx, StatxFlags};

use crate::{Error, Result};

/// The largest alignment that direct I/O is used with: all callers align to it.
const ALIGNMENT_MAX: usize = 4096;

/// `STATX_DIO_READ_ALIGN` (Linux 6.14): reads may need less alignment than writes.
const STATX_DIO_READ_ALIGN: StatxFlags = StatxFlags::from_bits_retain(0x2_0000);

/// `TMPFS_MAGIC`.
pub(super) const TMPFS_MAGIC: u32 = 0x0102_1994;

/// Whether to bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Where the file system supports it; buffered with a recorded reason elsewhere.
    #[default]
    Auto,
    /// Direct, or an error.
    On,
    /// Buffered.
    Off,
}

impl fmt::Display for Direct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direct::Auto => "auto",
            Direct::On => "on",
            Direct::Off => "off",
        })
    }
}

impl FromStr for Direct {
    type Err = Error;

    fn from_str(word: &str) -> Result<Direct> {
        match word {
            "auto" => Ok(Direct::Auto),
            "on" => Ok(Direct::On),
            "off" => Ok(Direct::Off),
            _ => Err(Error::UnknownWord {
                setting: "direct",
                word: word.to_owned(),
                expected: "\"auto\", \"on\" or \"off\"",
            }),
        }
    }
}

/// The alignment that a file's transfers need, in bytes; each a power of two of at most 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Alignment of the buffer's address.
    pub memory: usize,
    /// Alignment of the offset in the file and of the length.
    pub offset: usize,
}

impl Alignment {
    /// No alignment: a buffered file.
    pub(super) const NONE: Alignment = Alignment {
        memory: 1,
        offset: 1,
    };
}

/// The alignment that direct I/O on this file needs, or the reason to stay buffered.
pub(super) fn direct_alignment(
    fd: &OwnedFd,
    is_read: bool,
) -> std::result::Result<Alignment, String> {
    // tmpfs accepts O_DIRECT since Linux 6.6 and ignores it: its files are the page cache.
    if rustix::fs::fstatfs(fd).is_ok_and(|fs| fs.f_type as u32 == TMPFS_MAGIC) {
        return Err("tmpfs keeps files in the page cache".to_owned());
    }
    let mask = StatxFlags::DIOALIGN | STATX_DIO_READ_ALIGN;
    let reported = match rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, mask) {
        Ok(reported) => alignment_of(&reported, is_read),
        // The kernel has no statx (before Linux 4.11), or a seccomp filter hides it.
        Err(_) => None,
    };
    // A kernel before 6.1, or a file system that reports nothing: a page suits every file system
    // that accepts the flag.
    let alignment = reported.unwrap_or(Alignment {
        memory: ALIGNMENT_MAX,
        offset: ALIGNMENT_MAX,
    });
    if alignment.memory == 0 || alignment.offset == 0 {
        return Err("the file system does not support direct I/O on this file".to_owned());
    }
    let coarsest = alignment.memory.max(alignment.offset);
    if coarsest > ALIGNMENT_MAX {
        return Err(format!(
            "direct I/O would need an alignment of {coarsest} bytes, more than {ALIGNMENT_MAX}"
        ));
    }
    Ok(alignment)
}

/// The kernel's alignment for direct I/O on a file, if it reports one.
fn alignment_of(statx: &Statx, is_read: bool) -> Option<Alignment> {
    let answered = StatxFlags::from_bits_retain(statx.stx_mask);
    if !answered.contains(StatxFlags::DIOALIGN) {
        return None;
    }
    let has_own = answered.contains(STATX_DIO_READ_ALIGN) && statx.stx_dio_read_offset_align > 0;
    let offset = if is_read && has_own {
        statx.stx_dio_read_offset_align
    } else {
        statx.stx_dio_offset_align
    };
    Some(Alignment {
        memory: statx.stx_dio_mem_align as usize,
        offset: offset as usize,
    })
}
