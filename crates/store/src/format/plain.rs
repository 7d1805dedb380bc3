//! Files that are files: how those of a checkpoint are looked at and opened.
//!
//! A symbolic link in the place of one is not followed. It would let whoever hands a checkpoint out
//! choose what of the reader's machine is read in its place, and a copy or a deletion would not be
//! one of the data. Nothing that is no file is waited for. Links on the way to a checkpoint, that to
//! its directory included, are the reader's own and followed.

use std::io;

use penstock_io::file_system::{Found, Kind};

/// Why what has a file's name is none, if it is none.
pub(crate) fn flaw(found: &Found) -> Option<&'static str> {
    match found.kind {
        Kind::File => None,
        Kind::Link => Some(
            "it is a symbolic link, which is not followed; a copy made with `cp -rL` holds the file",
        ),
        Kind::Directory | Kind::Other => Some("it is not a regular file"),
    }
}

/// Whether an error says that the bytes are gone, and not that reading went wrong: EIO, ENODATA,
/// EBADMSG, EILSEQ, EUCLEAN, EREMOTEIO, and the end of a file where there should be more.
pub(crate) fn is_lost(error: &io::Error) -> bool {
    const LOST: [i32; 6] = [5, 61, 74, 84, 117, 121];
    let number = error.raw_os_error();
    number.is_some_and(|number| LOST.contains(&number))
        || error.kind() == io::ErrorKind::UnexpectedEof
}
