//! Files of keys.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use zeroize::Zeroizing;

use crate::{KeyError, Result};

/// Bytes of a file of keys.
const FILE_BYTES_MAX: usize = 64 << 10;

/// The content of a file, or of a pipe.
pub(crate) fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>> {
    // All at once, as a vector that grows leaves copies in freed memory.
    let mut content = Zeroizing::new(vec![0; FILE_BYTES_MAX + 1]);
    let length = File::open(path)
        .and_then(|mut file| read_up_to(&mut file, &mut content))
        .map_err(|source| KeyError::Io {
            path: path.to_owned(),
            source,
        })?;
    if length > FILE_BYTES_MAX {
        return Err(KeyError::BadFile {
            path: path.to_owned(),
            line: None,
            reason: "it is larger than 64 KiB, so it is no file of keys".to_owned(),
        });
    }
    content.truncate(length);
    Ok(content)
}

fn read_up_to(file: &mut File, content: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < content.len() {
        match file.read(&mut content[length..]) {
            Ok(0) => break,
            Ok(bytes) => length += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

/// Writes a file that only its owner can read. A file that exists stays as it is.
pub(crate) fn write_new(path: &Path, content: &[u8]) -> Result<()> {
    let failed = |source| KeyError::Io {
        path: path.to_owned(),
        source,
    };
    let mut options = OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(failed)?;
    let written = file.write_all(content).and_then(|()| file.sync_all());
    let written = written.and_then(|()| File::open(directory(path))?.sync_all());
    written.map_err(|source| {
        // A part of a key is of no use; the error that is reported is the first one.
        let _ = fs::remove_file(path);
        failed(source)
    })
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
