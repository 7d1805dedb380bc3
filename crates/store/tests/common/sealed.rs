//! Sealed saves of tests: for one recipient, and never with a key and nonce that were used before.

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_io::file_system::FileSystem;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::report::SaveReport;
use penstock_store::save::{self, Publication, SaveState, save_sealed};
use penstock_store::seal::{DataKey, KeyError, Seal, Sealing, Unsealing, Unwrap, Wrap};
use penstock_store::{Progress, Result};

/// The keys and nonces of all messages that this process has sealed.
static SEALED: Mutex<Option<HashSet<Seal>>> = Mutex::new(None);

/// An identity for wraps that hold the data key as it is.
struct Bare;

impl Unwrap for Bare {
    fn unwrap(&self, wraps: &[Wrap]) -> std::result::Result<DataKey, KeyError> {
        let [wrap] = wraps else {
            panic!("a save of tests has one recipient");
        };
        Ok(DataKey::from_bytes(wrap.key.as_slice().try_into().unwrap()))
    }
}

/// A new data key.
pub fn sealing() -> Sealing {
    let key = DataKey::generate().unwrap();
    let wrap = Wrap {
        kind: "test".to_owned(),
        recipient: "bare".to_owned(),
        key: key.expose().to_vec(),
    };
    Sealing::new(Arc::new(key), vec![wrap]).watched_by(Arc::new(|seal| {
        let mut sealed = SEALED.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = sealed.get_or_insert_default().insert(*seal);
        assert!(is_new, "{seal:?} seals a second text");
    }))
}

/// Saves, sealed if the options say so.
pub fn save(
    state: SaveState,
    publication: &Publication,
    options: &Options,
    progress: &Progress,
) -> Result<SaveReport> {
    match options.is_sealed {
        true => save_sealed(state, publication, sealing(), options, progress),
        false => save::save(state, publication, options, progress),
    }
}

/// The same options for a save that cannot be sealed.
pub fn clear(options: &Options) -> Options {
    Options {
        is_sealed: false,
        ..options.clone()
    }
}

/// Opens a checkpoint, sealed or clear.
pub fn open(path: &Path, file_system: &Arc<dyn FileSystem>) -> Result<Checkpoint> {
    let unsealing = Unsealing {
        identities: Some(Arc::new(Bare)),
        ..Unsealing::default()
    };
    Checkpoint::open_with(path, file_system, &unsealing)
}

/// A checkpoint that was opened without a key, opened with it; `None` if it is clear.
pub fn opened(checkpoint: &Checkpoint, options: &Options) -> Result<Option<Checkpoint>> {
    let is_closed = checkpoint.is_closed();
    let open = || open(checkpoint.path(), &options.file_system);
    is_closed.then(open).transpose()
}
