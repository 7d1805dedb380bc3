//! A table on real files, and the content of its rows.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use penstock_gather::{
    Cache, Error, Form, Merging, MutableTable, NewTable, Opening, Policy, Storage,
};
use penstock_io::buffer::{HostRegion, Memory};
use penstock_io::engine::{self, EngineChoice, EngineConfig};
use penstock_io::executor::{Executor, ExecutorConfig, OpenEngine};
use penstock_io::faulty::{Faults, Faulty};
use penstock_io::file::Direct;
use penstock_io::file_system::FileSystem;

/// Nothing here takes nearly that long, so a test that does hangs.
const HANG: Duration = Duration::from_secs(120);

/// The version of a row that was never written.
pub(crate) const NEVER: u64 = 0;

const SMALL: ExecutorConfig = ExecutorConfig {
    engine: EngineChoice::Auto,
    workers: 2,
    queue_depth: 4,
    in_flight_bytes: 4 * (32 << 10),
    block_bytes: 32 << 10,
    staging_bytes: 1 << 20,
    queued_max: 64,
};

pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// An executor whose engines inject faults.
pub(crate) fn executor(choice: EngineChoice, faults: &Arc<Faults>) -> Executor {
    let faults = Arc::clone(faults);
    let config = EngineConfig {
        choice,
        queue_depth: SMALL.queue_depth,
    };
    let open: OpenEngine = Arc::new(move || {
        let inner = engine::open(&config)?.engine;
        Ok(Box::new(Faulty::new(inner, Arc::clone(&faults))))
    });
    Executor::open_with(&SMALL, &open).unwrap()
}

pub(crate) fn storage(
    executor: &Executor,
    file_system: Arc<dyn FileSystem>,
    direct: Direct,
) -> Storage {
    Storage {
        file_system,
        direct,
        share: Arc::new(executor.share(1).unwrap()),
    }
}

pub(crate) fn form(rows: u64, value_bytes: u64, piece_rows: u64) -> Form {
    Form {
        rows,
        row_bytes: value_bytes.next_multiple_of(8),
        value_bytes,
        piece_rows,
    }
}

/// Byte `at` of a row written with a version, which its first eight bytes contain.
pub(crate) fn byte(id: u64, version: u64, at: u64) -> u8 {
    match at {
        _ if version == NEVER => 0,
        0..8 => version.to_le_bytes()[at as usize],
        _ => (id.wrapping_mul(2_654_435_761) + version * 977 + at * 131) as u8,
    }
}

/// Consecutive rows.
pub(crate) fn rows(form: &Form, written: &[(u64, u64)]) -> HostRegion {
    let width = form.value_bytes;
    let mut memory = Memory::allocate(written.len() * width as usize).unwrap();
    let places = memory.as_mut_slice().chunks_mut(width as usize);
    for (place, &(id, version)) in places.zip(written) {
        for (at, one) in (0..).zip(place) {
            *one = byte(id, version, at);
        }
    }
    let bytes = memory.len();
    HostRegion::within(&Arc::new(memory), 0..bytes)
}

pub(crate) fn create(home: &Path, form: Form, storage: Storage) -> Result<(), Error> {
    let note = serde_json::json!({"what": "a test"});
    NewTable::begin(home, form, note, storage)?.finish()
}

pub(crate) fn open(
    home: &Path,
    storage: Storage,
    slots: Option<u32>,
    log_bytes: u64,
) -> Result<MutableTable, Error> {
    open_with(home, storage, slots, log_bytes, 1 << 20)
}

pub(crate) fn open_with(
    home: &Path,
    storage: Storage,
    slots: Option<u32>,
    log_bytes: u64,
    record_bytes: u64,
) -> Result<MutableTable, Error> {
    let (form, _) = MutableTable::describe(home)?;
    let cache = slots.map(|slots| {
        Arc::new(Cache::new(slots, form.value_bytes as usize, Policy::Sieve).unwrap())
    });
    let opening = Opening {
        cache,
        merging: Merging {
            gap_bytes: 4096,
            run_bytes_max: 16 << 10,
        },
        log_bytes,
        record_bytes,
    };
    MutableTable::open(home, storage, opening)
}

pub(crate) fn update(table: &MutableTable, written: &[(u64, u64)]) -> Result<(), Error> {
    let ids: Vec<u64> = written.iter().map(|(id, _)| *id).collect();
    table.update(&ids, &rows(table.form(), written))
}

/// The version of each row; an error text for bytes that were never written.
pub(crate) fn versions(table: &MutableTable, ids: &[u64], latest: u64) -> Result<Vec<u64>, String> {
    let width = table.form().value_bytes as usize;
    let (handle, out) = Memory::allocate(ids.len() * width).unwrap().share();
    let reported = |error: Error| error.to_string();
    let batch = table.look_up(ids, out).map_err(reported)?;
    assert!(batch.wait(Some(HANG)).map_err(reported)?, "it hangs");
    drop(batch);
    let memory = handle.reclaim().expect("nobody has it any more");
    versions_in(memory.as_slice(), width, width, ids, latest)
}

/// The versions of rows in memory.
pub(crate) fn versions_in(
    memory: &[u8],
    step: usize,
    width: usize,
    ids: &[u64],
    latest: u64,
) -> Result<Vec<u64>, String> {
    let version = |(row, &id): (&[u8], &u64)| {
        let row = &row[..width];
        let found = u64::from_le_bytes(row[..8].try_into().expect("eight bytes"));
        let mut bytes = row.iter().zip(0..);
        let is_whole = bytes.all(|(&one, at)| one == byte(id, found, at));
        match is_whole && found <= latest {
            true => Ok(found),
            false => Err(format!("row {id} is torn: {row:?}")),
        }
    };
    memory.chunks(step).zip(ids).map(version).collect()
}
