//! Lays out and checks every state of a table that a power cut at any moment could leave.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use penstock_gather::{Error, MutableTable};
use penstock_io::engine::EngineChoice;
use penstock_io::executor::Executor;
use penstock_io::faulty::crash::{Image, states};
use penstock_io::faulty::{Faults, FaultyFileSystem, Log};
use penstock_io::file::Direct;
use penstock_io::file_system::Native;

use crate::mutant::Mutant;
use crate::world::{NEVER, create, executor, form, open, open_with, storage, update, versions};

/// Rows of every table here, and rows of a piece.
pub(crate) const ROWS: u64 = 4;
const PIECE_ROWS: u64 = 2;

/// More states than any moment has.
const STATES_MAX: u64 = 1 << 16;

/// An event, at a position of the log of operations.
#[derive(Clone, Debug)]
enum Note {
    /// The table was created.
    Created,
    /// These rows may have been written from now on: all so far, oldest first.
    Writing(Vec<(u64, u64)>),
    /// This many rows were flushed.
    Flushed(usize),
}

/// Bytes of a log, and of a record.
pub(crate) type Sizes = (u64, u64);

/// A table whose operations are recorded.
pub(crate) struct World {
    directory: tempfile::TempDir,
    log: Arc<Log>,
    pub(crate) mutant: Arc<Mutant>,
    executor: Executor,
    direct: Direct,
    sizes: Sizes,
    table: Option<MutableTable>,
    /// Rows written so far, oldest first, with their versions.
    written: Vec<(u64, u64)>,
    latest: u64,
    notes: Mutex<Vec<(usize, Note)>>,
    begun: usize,
}

impl World {
    pub(crate) fn new(engine: EngineChoice, direct: Direct, sizes: Sizes) -> World {
        let directory = scratch();
        let log = Arc::new(Log::new(directory.path()));
        let faults = Arc::new(Faults::new(0).record(Arc::clone(&log)));
        let file_system = FaultyFileSystem::new(Arc::new(Native), Arc::clone(&faults));
        let home = directory.path().join("table");
        World {
            mutant: Arc::new(Mutant::new(Arc::new(file_system), &home)),
            executor: executor(engine, &faults),
            directory,
            log,
            direct,
            sizes,
            table: None,
            written: Vec::new(),
            latest: NEVER,
            notes: Mutex::default(),
            begun: 0,
        }
    }

    fn note(&self, note: Note) {
        let now = self.log.position();
        self.notes.lock().unwrap().push((now, note));
    }

    fn storage(&self) -> penstock_gather::Storage {
        let file_system = Arc::clone(&self.mutant);
        storage(&self.executor, file_system, self.direct)
    }

    fn table(&self) -> &MutableTable {
        self.table.as_ref().expect("it is open")
    }

    /// Starts the exploration at the current position.
    pub(crate) fn begin(&mut self) {
        self.begun = self.log.position();
    }

    pub(crate) fn create(&mut self) -> Result<(), Error> {
        let home = self.directory.path().join("table");
        create(&home, form(ROWS, 16, PIECE_ROWS), self.storage())?;
        self.note(Note::Created);
        Ok(())
    }

    pub(crate) fn open(&mut self) -> Result<(), Error> {
        self.table = None;
        let home = self.directory.path().join("table");
        let (log_bytes, record_bytes) = self.sizes;
        let table = open_with(&home, self.storage(), Some(2), log_bytes, record_bytes)?;
        // Unflushed updates may be there, except for the last ones.
        let held = all(&table, self.latest).expect("no row is torn");
        let is_held = |count: &usize| after(&self.written[..*count]) == held;
        let found = (0..=self.written.len()).rev().find(is_held);
        self.written
            .truncate(found.expect("the last ones are lost first"));
        self.note(Note::Writing(self.written.clone()));
        self.table = Some(table);
        Ok(())
    }

    pub(crate) fn update(&mut self, ids: &[u64]) -> Result<(), Error> {
        let those: Vec<(u64, u64)> = ids.iter().copied().zip(self.latest + 1..).collect();
        self.latest += ids.len() as u64;
        self.written.extend(&those);
        self.note(Note::Writing(self.written.clone()));
        update(self.table(), &those)
    }

    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        self.table().flush()?;
        self.note(Note::Flushed(self.written.len()));
        Ok(())
    }

    pub(crate) fn compact(&mut self) -> Result<(), Error> {
        self.table().freeze()?.compact()?;
        // Freezing flushes.
        self.note(Note::Flushed(self.written.len()));
        Ok(())
    }

    /// Takes a snapshot, updates and flushes rows, then compacts the snapshot.
    pub(crate) fn compact_during_writes(&mut self, ids: &[u64]) -> Result<(), Error> {
        let frozen = self.table().freeze()?;
        self.update(ids)?;
        self.flush()?;
        frozen.compact().map(drop)
    }

    /// The states allowed after a cut at a position.
    fn expected(&self, position: usize) -> Expected {
        let mut expected = Expected::default();
        for (_, note) in self
            .notes
            .lock()
            .unwrap()
            .iter()
            .filter(|(at, _)| *at <= position)
        {
            match note {
                Note::Created => expected.is_created = true,
                Note::Writing(written) => expected.written.clone_from(written),
                Note::Flushed(count) => expected.least = *count,
            }
        }
        expected
    }
}

#[derive(Clone, Debug, Default, Hash)]
struct Expected {
    is_created: bool,
    /// Rows that were written, oldest first.
    written: Vec<(u64, u64)>,
    /// How many of them must be there.
    least: usize,
}

/// Numbers of the exploration, and the violations found.
#[derive(Default)]
pub(crate) struct Exploration {
    pub(crate) moments: usize,
    pub(crate) states: u64,
    pub(crate) distinct: usize,
    pub(crate) violations: Vec<String>,
}

fn scratch() -> tempfile::TempDir {
    let made = tempfile::tempdir_in("/dev/shm");
    made.or_else(|_| tempfile::tempdir()).unwrap()
}

/// Checks every state that a cut at any position since `begin` could leave.
pub(crate) fn explore(world: &World) -> Exploration {
    let mut found = Exploration::default();
    let mut seen = HashSet::new();
    let checker = executor(EngineChoice::Threads, &Arc::new(Faults::new(0)));
    for position in world.begun..=world.log.position() {
        let expected = world.expected(position);
        let mut visit = |image: &Image| {
            let mut hasher = DefaultHasher::new();
            (image, &expected).hash(&mut hasher);
            if seen.insert(hasher.finish())
                && let Err(violation) = check_table(image, &expected, world, &checker)
            {
                found
                    .violations
                    .push(format!("moment {position}: {violation}"));
            }
            match found.violations.is_empty() {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        };
        let coverage = states(&world.log, position, STATES_MAX, 0, &mut visit);
        let is_over = !found.violations.is_empty();
        assert!(
            coverage.is_exhaustive || is_over,
            "moment {position} has more than {STATES_MAX} states"
        );
        found.moments += 1;
        found.states += coverage.visited;
        if is_over {
            break;
        }
    }
    found.distinct = seen.len();
    found
}

fn check_table(
    image: &Image,
    expected: &Expected,
    world: &World,
    executor: &Executor,
) -> Result<(), String> {
    let directory = scratch();
    image
        .materialise(directory.path(), &Image::default())
        .unwrap();
    let home = directory.path().join("table");
    let storage = || storage(executor, Arc::new(Native), Direct::Off);
    let reported = |error: Error| error.to_string();
    let table = match open(&home, storage(), None, world.sizes.0) {
        Err(Error::NoTable { .. }) if !expected.is_created => {
            // It can be created as if the directory had been empty.
            create(&home, form(ROWS, 16, PIECE_ROWS), storage()).map_err(reported)?;
            open(&home, storage(), None, world.sizes.0).map_err(reported)?
        }
        opened => opened.map_err(reported)?,
    };
    let held = all(&table, world.latest)?;
    let is_held = |count: usize| after(&expected.written[..count]) == held;
    if !(expected.least..=expected.written.len()).any(is_held) {
        return Err(format!("{held:?}, with {expected:?}"));
    }
    continue_writing(table, &home, &held, world, executor)
}

/// Continues from a recovered state: further updates are there after the next opening, compacted
/// or not, together with the old rows.
fn continue_writing(
    table: MutableTable,
    home: &Path,
    held: &[u64],
    world: &World,
    executor: &Executor,
) -> Result<(), String> {
    let storage = || storage(executor, Arc::new(Native), Direct::Off);
    let reported = |error: Error| error.to_string();
    let next = world.latest + 1;
    update(&table, &[(1, next)]).map_err(reported)?;
    table.flush().map_err(reported)?;
    drop(table);
    let mut wanted = held.to_vec();
    wanted[1] = next;
    for is_compacted in [false, true] {
        let table = open(home, storage(), None, world.sizes.0).map_err(reported)?;
        let found = all(&table, next)?;
        if found != wanted {
            return Err(format!(
                "then {found:?} of {wanted:?}, compacted: {is_compacted}"
            ));
        }
        table
            .freeze()
            .and_then(|frozen| frozen.compact())
            .map_err(reported)?;
    }
    let names = std::fs::read_dir(home).unwrap().count() as u64;
    // The manifest, the lock file, and the pieces.
    match names == 2 + ROWS.div_ceil(PIECE_ROWS) {
        true => Ok(()),
        false => Err(format!("{names} files are left")),
    }
}

fn all(table: &MutableTable, latest: u64) -> Result<Vec<u64>, String> {
    let ids: Vec<u64> = (0..ROWS).collect();
    versions(table, &ids, latest)
}

/// The versions of all rows after these updates.
fn after(written: &[(u64, u64)]) -> Vec<u64> {
    let mut rows = vec![NEVER; ROWS as usize];
    for &(id, version) in written {
        rows[id as usize] = version;
    }
    rows
}
