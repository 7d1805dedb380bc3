//! Records every key and nonce that seals, for tests that span processes.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::sync::{Arc, OnceLock};

/// Called for each message that is sealed.
pub type Witness = Arc<dyn Fn(&Seal) + Send + Sync>;

/// A sealed message: AES-GCM is broken by two of them with equal key and nonce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seal {
    /// SHA-256 of the key.
    pub key: [u8; 32],
    /// The nonce.
    pub nonce: [u8; 12],
}

/// Names a file that gets, for each sealed message, the SHA-256 of its key and its nonce.
const VARIABLE: &str = "PENSTOCK_RECORD_SEALS";

/// The witness that appends to the file of the variable; None without the variable.
pub(super) fn witness() -> Option<Witness> {
    static WITNESS: OnceLock<Option<Witness>> = OnceLock::new();
    WITNESS.get_or_init(from_environment).clone()
}

fn from_environment() -> Option<Witness> {
    let path = std::env::var_os(VARIABLE)?;
    let file = OpenOptions::new().create(true).append(true).open(path);
    // A test that asks for a record must not pass without one.
    Some(to_file(
        file.expect("the file that PENSTOCK_RECORD_SEALS names"),
    ))
}

/// Appends each record by one write, so that processes and forks share the file.
fn to_file(file: File) -> Witness {
    Arc::new(move |seal: &Seal| {
        let mut record = [0; 44];
        record[..32].copy_from_slice(&seal.key);
        record[32..].copy_from_slice(&seal.nonce);
        let written = (&file).write_all(&record);
        written.expect("room for the record of a seal");
    })
}
