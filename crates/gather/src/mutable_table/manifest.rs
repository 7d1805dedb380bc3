//! The manifest of a mutable table, which names its files. Replacing it is the commit.

use std::fs;
use std::path::{Path, PathBuf};

use crc_fast::CrcAlgorithm::Crc64Nvme;
use penstock_io::file::Direct;
use penstock_io::file_system::{Change, FileSystem};
use serde::{Deserialize, Serialize};

use super::form::Form;
use super::lock::Lock;
use crate::error::{Error, Result};

/// The manifest's file name.
pub const TABLE_MANIFEST: &str = "table.json";
const NEW_NAME: &str = "table.json.new";

/// Exists while a table is being created, to recognise the files of an unfinished one.
const MARKER: &str = "table.new";
const FORMAT: &str = "penstock-table";
const VERSION: u32 = 1;

/// The manifest of a mutable table.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct TableManifest {
    format: String,
    version: u32,
    /// A random identifier of this table in 16 hexadecimal digits, independent of its path.
    id: String,
    rows: u64,
    row_bytes: u64,
    value_bytes: u64,
    piece_rows: u64,
    /// The file number of each piece.
    pub(super) pieces: Vec<u64>,
    /// Closed logs, in order.
    pub(super) closed: Vec<Closed>,
    /// The log that is appended to, if any.
    pub(super) open: Option<u64>,
    /// The file number of the next piece.
    pub(super) next_piece: u64,
    /// The file number of the next log.
    pub(super) next_log: u64,
    /// The creator's metadata.
    pub(super) note: serde_json::Value,
}

/// A log that is no longer appended to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Closed {
    /// Its file number.
    pub(super) number: u64,
    /// Where its last record ends, in bytes.
    pub(super) end: u64,
}

impl TableManifest {
    /// The manifest of a new table.
    pub(super) fn new(form: &Form, note: serde_json::Value) -> TableManifest {
        TableManifest {
            format: FORMAT.to_owned(),
            version: VERSION,
            id: format!("{:016x}", uuid::Uuid::new_v4().as_u64_pair().0),
            rows: form.rows,
            row_bytes: form.row_bytes,
            value_bytes: form.value_bytes,
            piece_rows: form.piece_rows,
            pieces: Vec::new(),
            closed: Vec::new(),
            open: None,
            next_piece: 0,
            next_log: 0,
            note,
        }
    }

    /// The identifier of this table, which its files contain too.
    pub(super) fn id(&self) -> u64 {
        u64::from_str_radix(&self.id, 16).expect("it was looked at when it was read")
    }

    pub(super) fn form(&self) -> Form {
        Form {
            rows: self.rows,
            row_bytes: self.row_bytes,
            value_bytes: self.value_bytes,
            piece_rows: self.piece_rows,
        }
    }

    /// Takes an unused file number for a piece.
    pub(super) fn take_piece(&mut self) -> u64 {
        self.next_piece += 1;
        self.next_piece - 1
    }

    /// Whether a file of the directory belongs to the table.
    pub(super) fn has(&self, name: &str) -> bool {
        name == TABLE_MANIFEST
            || self.pieces.iter().any(|&one| name == piece_name(one))
            || self.logs().any(|one| name == log_name(one))
    }

    /// The numbers of all logs, in order.
    pub(super) fn logs(&self) -> impl Iterator<Item = u64> {
        self.closed.iter().map(|one| one.number).chain(self.open)
    }

    /// Reads the manifest of a table.
    ///
    /// # Errors
    /// [`Error::NoTable`], [`Error::Broken`], [`Error::Newer`].
    pub(super) fn read(home: &Path) -> Result<TableManifest> {
        let path = home.join(TABLE_MANIFEST);
        let text = match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::NoTable {
                    path: home.to_owned(),
                });
            }
            read => read.map_err(|source| penstock_io::Error::Storage {
                operation: "read",
                path: path.clone(),
                source,
            })?,
        };
        let broken = |detail: String| Error::Broken {
            path: path.clone(),
            detail,
        };
        let lines = text
            .strip_suffix(b"\n")
            .and_then(|text| text.iter().rposition(|&byte| byte == b'\n'));
        let Some(at) = lines else {
            return Err(broken("it is cut off".to_owned()));
        };
        let (line, sum) = (&text[..at], &text[at + 1..text.len() - 1]);
        if sum != sum_of(line).as_bytes() {
            return Err(broken("it is not what was written".to_owned()));
        }
        let value: serde_json::Value =
            serde_json::from_slice(line).map_err(|error| broken(error.to_string()))?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if version > u64::from(VERSION) => {
                let supported = u64::from(VERSION);
                return Err(Error::Newer {
                    path,
                    version,
                    supported,
                });
            }
            _ => {}
        }
        let manifest: TableManifest =
            serde_json::from_value(value).map_err(|error| broken(error.to_string()))?;
        let form = manifest.form();
        let is_numbered = u64::from_str_radix(&manifest.id, 16).is_ok();
        let is_one = manifest.format == FORMAT && form.is_sound() && is_numbered;
        if !is_one || manifest.pieces.len() as u64 != form.pieces() {
            return Err(broken("it describes no table".to_owned()));
        }
        Ok(manifest)
    }

    /// Commits this manifest, and makes the names of its files durable. Their contents must be
    /// durable before.
    pub(super) fn commit(&self, home: &Path, file_system: &dyn FileSystem) -> Result<()> {
        let mut text = serde_json::to_string(self).expect("a manifest is plain data");
        let sum = sum_of(text.as_bytes());
        text.push('\n');
        text.push_str(&sum);
        text.push('\n');
        file_system.change(Change::SyncDirectory(home))?;
        let (new, path) = (home.join(NEW_NAME), home.join(TABLE_MANIFEST));
        if new.exists() {
            file_system.change(Change::RemoveFile(&new))?;
        }
        let file = file_system.create(&new, Direct::Off)?;
        file_system.change(Change::Write(&file, text.as_bytes()))?;
        file_system.change(Change::SyncData(&file))?;
        file_system.change(Change::Rename {
            from: &new,
            to: &path,
        })?;
        file_system.change(Change::SyncDirectory(home))?;
        Ok(())
    }
}

fn sum_of(line: &[u8]) -> String {
    format!("{:016x}", crc_fast::checksum(Crc64Nvme, line))
}

fn piece_name(number: u64) -> String {
    format!("rows-{number}")
}

fn log_name(number: u64) -> String {
    format!("log-{number}")
}

/// Begins to create a table in a directory.
///
/// # Errors
/// [`Error::Exists`]; [`Error::NotEmpty`] if it contains other files.
pub(super) fn begin(home: &Path, file_system: &dyn FileSystem) -> Result<()> {
    let listed = fs::read_dir(home).map_err(|source| penstock_io::Error::Storage {
        operation: "list",
        path: home.to_owned(),
        source,
    })?;
    let names = listed.flatten().map(|entry| entry.file_name());
    let names: Vec<String> = names
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| !Lock::is_it(name))
        .collect();
    let path = home.to_owned();
    if names.iter().any(|name| name == TABLE_MANIFEST) {
        return Err(Error::Exists { path });
    }
    if names.iter().any(|name| name == MARKER) {
        return Ok(());
    }
    if let Some(name) = names.into_iter().next() {
        return Err(Error::NotEmpty { path, name });
    }
    drop(file_system.create(&home.join(MARKER), Direct::Off)?);
    file_system.change(Change::SyncDirectory(home))?;
    Ok(())
}

/// Ends the creation of a table in a directory.
pub(super) fn end(home: &Path, file_system: &dyn FileSystem) {
    let marker = home.join(MARKER);
    if marker.exists() {
        drop(file_system.change(Change::RemoveFile(&marker)));
    }
}

pub(super) fn piece_path(home: &Path, number: u64) -> PathBuf {
    home.join(piece_name(number))
}

pub(super) fn log_path(home: &Path, number: u64) -> PathBuf {
    home.join(log_name(number))
}

/// Removes pieces and logs that the manifest does not name: left by attempts that ended before
/// their commit, or replaced by the last one. A file that cannot be removed stays.
pub(super) fn sweep(home: &Path, manifest: &TableManifest, file_system: &dyn FileSystem) {
    let Ok(entries) = fs::read_dir(home) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let is_ours = ["rows-", "log-"].iter().any(|kind| {
            let number = name.strip_prefix(kind);
            let is_plain = |text: &str| text.parse().is_ok_and(|it: u64| it.to_string() == text);
            number.is_some_and(is_plain)
        });
        if (is_ours || name == NEW_NAME) && !manifest.has(&name) {
            drop(file_system.change(Change::RemoveFile(&home.join(&*name))));
        }
    }
}
