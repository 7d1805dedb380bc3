//! Files that are files: how those of a checkpoint are looked at and opened.
//!
//! A symbolic link in the place of one is not followed. It would let whoever hands a checkpoint out
//! choose what of the reader's machine is read in its place, and a copy or a deletion would not be
//! one of the data. Nothing that is no file is waited for. Links on the way to a checkpoint, that to
//! its directory included, are the reader's own and followed.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use penstock_io::file::{Direct, File};

/// Why what has a file's name is none, if it is none.
pub(crate) fn flaw(metadata: &fs::Metadata) -> Option<&'static str> {
    if metadata.is_symlink() {
        return Some(
            "it is a symbolic link, which is not followed; a copy made with `cp -rL` holds the file",
        );
    }
    (!metadata.is_file()).then_some("it is not a regular file")
}

/// Whether something has this name, a link to nothing included.
pub(crate) fn is_there(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Opens a file to read it without an engine.
pub(crate) fn open(path: &Path) -> io::Result<fs::File> {
    match File::open(path, Direct::Off) {
        Ok(file) => Ok(file.into()),
        Err(penstock_io::Error::Storage { source, .. }) => Err(source),
        Err(error) => Err(io::Error::other(error)),
    }
}

/// The bytes of a whole file.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Whether an error says that the bytes are gone, and not that reading went wrong: EIO, ENODATA,
/// EBADMSG, EILSEQ, EUCLEAN, EREMOTEIO, and the end of a file where there should be more.
pub(crate) fn is_lost(error: &io::Error) -> bool {
    const LOST: [i32; 6] = [5, 61, 74, 84, 117, 121];
    let number = error.raw_os_error();
    number.is_some_and(|number| LOST.contains(&number))
        || error.kind() == io::ErrorKind::UnexpectedEof
}
