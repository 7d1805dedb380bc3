//! Regular files: how the files of a checkpoint are looked up and opened.
//!
//! A symbolic link in place of one of these files is not followed. It would let the author of a
//! checkpoint choose which file of the reader's machine is read instead, and a copy or a deletion
//! would not affect the data. Nothing but a regular file is opened, since opening other kinds may
//! block. Links on the path to a checkpoint, including one to its directory, belong to the reader
//! and are followed.

use std::io;

use penstock_io::file_system::{FileStat, Kind};

/// The reason why an entry is not a regular file, if it is not.
pub(crate) fn flaw(found: &FileStat) -> Option<&'static str> {
    match found.kind {
        Kind::File => None,
        Kind::Link => Some(
            "it is a symbolic link, which is not followed; a copy made with `cp -rL` holds the file",
        ),
        Kind::Directory | Kind::Other => Some("it is not a regular file"),
    }
}

/// Whether an error means that bytes are lost, not that the read failed: EIO, ENODATA, EBADMSG,
/// EILSEQ, EUCLEAN, EREMOTEIO, and an unexpected end of file.
pub(crate) fn is_lost(error: &io::Error) -> bool {
    const LOST: [i32; 6] = [5, 61, 74, 84, 117, 121];
    let number = error.raw_os_error();
    number.is_some_and(|number| LOST.contains(&number))
        || error.kind() == io::ErrorKind::UnexpectedEof
}
