//! Every single operation of a program fails, or is the last of its process.
//!
//! The program saves, replaces, retains, deletes and sweeps. All of its operations on storage pass
//! the two decorators of `penstock_io::faulty`, which count them: so each operation can fail, or
//! the process can be killed before it, in turn. In all cases acknowledged data exists, nothing is
//! damaged, a repeated call succeeds, and a sweep leaves nothing behind.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};

use crate::common::expect::{Expected, Note};
use crate::common::{Sample, engines, errno, faulty_storage, held, names, publication, sealed};
use penstock_io::engine::EngineChoice;
use penstock_io::faulty::{Failure, Faults, Repeat};
use penstock_store::format::manifest::PartEntry;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::save::{Attempt, Publication, SaveState, commit, write_rank};
use penstock_store::steps::store::Store;
use penstock_store::{Error, Progress, Result};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const SIGKILL: i32 = 9;

/// Environment variables that tell a child what to do, and before which operation to die.
const ROOT: &str = "PENSTOCK_TEST_STEP_ROOT";
const ENGINE: &str = "PENSTOCK_TEST_STEP_ENGINE";
const DIES_AT: &str = "PENSTOCK_TEST_STEP_DIES_AT";
const RANK: &str = "PENSTOCK_TEST_STEP_RANK";

/// A state of small tensors for two shards, which differ with the seed.
fn sample(seed: u64) -> Sample {
    Sample::seeded_rank(seed, &[70_000, 600])
}

fn samples() -> HashMap<u64, Sample> {
    (1..=9).map(|seed| (seed, sample(seed))).collect()
}

/// One call of the program.
#[derive(Clone, Copy, Debug)]
enum Call {
    Save(u64, u64),
    /// Saves a state whose last tensor is in a separate file.
    SaveHeld(u64, u64),
    Replace(u64, u64),
    Retain(u64, u64),
    Delete(u64),
    Sweep,
}

const PROGRAM: [Call; 10] = [
    Call::Save(1, 1),
    Call::Save(2, 2),
    Call::Replace(1, 3),
    Call::Save(3, 4),
    Call::Retain(2, 3),
    Call::Delete(2),
    Call::Sweep,
    Call::Replace(3, 5),
    Call::SaveHeld(4, 6),
    Call::Delete(3),
];

/// Calls that change storage, with their promises.
struct Program<'a> {
    store: Store,
    options: Options,
    note: &'a mut dyn FnMut(Note),
}

impl<'a> Program<'a> {
    fn new(root: &Path, options: Options, note: &'a mut dyn FnMut(Note)) -> Program<'a> {
        let options = Options {
            shard_bytes: Some(64 << 10),
            ..options
        };
        let store = Store::new(root).with_file_system(Arc::clone(&options.file_system));
        Program {
            store,
            options,
            note,
        }
    }

    fn call(&mut self, call: Call) -> Result<()> {
        match call {
            Call::Save(step, seed) => self.save(step, seed, false),
            Call::Replace(step, seed) => self.save(step, seed, true),
            Call::SaveHeld(step, seed) => {
                // The file is outside of all steps, and somebody else's.
                let file = self.store.root().join(format!("held-{seed}"));
                let state = held::write(&sample(seed), 1, &file);
                self.save_state(step, seed, state, false)?;
                fs::remove_file(file).unwrap();
                Ok(())
            }
            Call::Retain(keep_last, saved) => {
                for step in self.store.steps()? {
                    if step < saved {
                        (self.note)(Note::Retaining(step));
                    }
                }
                for step in self.store.retain(Some(keep_last), None, Some(saved))? {
                    (self.note)(Note::Gone(step));
                }
                Ok(())
            }
            Call::Delete(step) => {
                (self.note)(Note::Deleting(step));
                match self.store.delete(step) {
                    // The call is repeated after it failed on its last operation.
                    Ok(_) | Err(Error::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                }
                (self.note)(Note::Deleted(step));
                Ok(())
            }
            Call::Sweep => self.store.sweep().map(drop),
        }
    }

    fn save(&mut self, step: u64, seed: u64, overwrite: bool) -> Result<()> {
        let is_sealed = seed.is_multiple_of(2);
        self.options.is_sealed = is_sealed;
        let saved = self.save_state(step, seed, sample(seed).state(), overwrite);
        self.options.is_sealed = false;
        saved
    }

    fn save_state(
        &mut self,
        step: u64,
        seed: u64,
        state: SaveState,
        overwrite: bool,
    ) -> Result<()> {
        (self.note)(Note::Saving(step, vec![seed]));
        let publication = step_publication(&self.store, step, overwrite);
        sealed::save(state, &publication, &self.options, &Progress::default())?;
        (self.note)(Note::Saved(step, vec![seed]));
        Ok(())
    }
}

fn step_publication(store: &Store, step: u64, overwrite: bool) -> Publication {
    Publication {
        step: Some(step),
        overwrite,
        ..publication(&store.step_path(step))
    }
}

/// Checks that the promises hold; returns the store's contents.
#[track_caller]
fn check(root: &Path, notes: &[Note], what: &str) -> BTreeMap<u64, Vec<u64>> {
    let expected = Expected::after(notes);
    let held = expected.check(&Store::new(root), &samples(), &Options::default());
    held.unwrap_or_else(|violation| panic!("{what}: {violation}"))
}

/// After a sweep there are only complete checkpoints, the same as before.
#[track_caller]
fn check_swept(root: &Path, notes: &[Note], what: &str) {
    let held = check(root, notes, what);
    let store = Store::new(root);
    store.sweep().unwrap();
    assert_eq!(check(root, notes, what), held, "{what}: a sweep changed it");
    for step in store.steps().unwrap() {
        let path = store.step_path(step);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let files = checkpoint.files().len();
        assert_eq!(names(&path).len(), files, "{what}: {:?}", names(&path));
    }
}

/// Number of operations of the whole program without failures.
fn operations(engine: EngineChoice) -> u64 {
    let root = tempfile::tempdir().unwrap();
    let faults = Arc::new(Faults::new(0));
    let mut notes = Vec::new();
    let mut note = |said| notes.push(said);
    let options = faulty_storage(engine, Arc::clone(&faults));
    let mut program = Program::new(root.path(), options, &mut note);
    for call in PROGRAM {
        program.call(call).unwrap();
    }
    check_swept(root.path(), &notes, "undisturbed");
    faults.operations()
}

/// Whether a failure may go unreported: one of cleaning up after an acknowledged save.
fn is_tidying(call: Call, operation: &str) -> bool {
    matches!(
        call,
        Call::Save(..) | Call::SaveHeld(..) | Call::Replace(..)
    ) && operation == "remove"
}

#[test]
fn each_failing_operation_is_reported_and_harms_nothing_and_the_call_can_be_made_again() {
    for &engine in engines() {
        let operations = operations(engine);
        assert!(operations > 60, "the program does something: {operations}");
        let mut unreported = 0;
        for nth in 1..=operations {
            for number in [EIO, ENOSPC] {
                unreported += u64::from(!fail_one(engine, nth, number));
            }
        }
        eprintln!("{engine}: {operations} operations failed in turn, {unreported} told nobody");
    }
}

/// Runs the program with one failing operation; returns whether its call reported the failure.
fn fail_one(engine: EngineChoice, nth: u64, number: i32) -> bool {
    let root = tempfile::tempdir().unwrap();
    let failure = Failure {
        class: None,
        nth,
        repeat: Repeat::Once,
        errno: number,
    };
    let failed: Arc<Mutex<Option<(&'static str, PathBuf)>>> = Arc::default();
    let seen = Arc::clone(&failed);
    let faults = Faults::new(nth).fail(failure);
    let faults = faults.call(move |operation, verb, path| {
        if operation == nth {
            *seen.lock().unwrap() = Some((verb, path.to_owned()));
        }
    });
    let mut notes = Vec::new();
    let mut refused = None;
    let mut note = |said| notes.push(said);
    let options = faulty_storage(engine, Arc::new(faults));
    let mut program = Program::new(root.path(), options, &mut note);
    for call in PROGRAM {
        let result = program.call(call);
        let failed = failed.lock().unwrap().clone();
        match (result, failed) {
            (Err(error), Some((verb, path))) => {
                let what = format!("{verb} {} in {call:?}", path.display());
                assert_eq!(errno(&error), Some(number), "{what}: {error}");
                refused = Some((call, what));
                break;
            }
            (Err(error), None) => panic!("{call:?}: {}", error.full_message()),
            (Ok(()), Some((verb, path))) => {
                assert!(
                    is_tidying(call, verb),
                    "{verb} {} failed in {call:?}",
                    path.display()
                );
                break;
            }
            (Ok(()), None) => {}
        }
    }
    let Some((call, what)) = refused else {
        check_swept(root.path(), &notes, "tidying up failed");
        return false;
    };
    check(root.path(), &notes, &what);
    let mut note = |said| notes.push(said);
    let mut program = Program::new(root.path(), Options::default(), &mut note);
    match program.call(call) {
        // The checkpoint is published, and only its last sync failed: it exists, without a promise.
        Err(Error::Exists { path }) => assert!(Checkpoint::open(&path).is_ok(), "{what}"),
        result => result.unwrap_or_else(|error| panic!("{what}: {error}")),
    }
    check_swept(root.path(), &notes, &what);
    true
}

/// From some operation on, all fail, as on a disk that is gone or full.
#[test]
fn a_disk_that_stops_working_keeps_what_it_had() {
    for &engine in engines() {
        for nth in 1..=operations(engine) {
            let what = format!("{engine:?} operation {nth} and all later ones");
            let root = tempfile::tempdir().unwrap();
            let failure = Failure {
                class: None,
                nth,
                repeat: Repeat::Forever,
                errno: if nth % 2 == 0 { EIO } else { ENOSPC },
            };
            let faults = Arc::new(Faults::new(nth).fail(failure));
            let mut notes = Vec::new();
            let mut note = |said| notes.push(said);
            let options = faulty_storage(engine, faults);
            let mut program = Program::new(root.path(), options, &mut note);
            for call in PROGRAM {
                // Later calls may have nothing left to do that could fail.
                let _ = program.call(call);
            }
            check_swept(root.path(), &notes, &what);
        }
    }
}

/// Options of a child that dies before the given operation.
fn dying(engine: EngineChoice) -> Options {
    let nth: u64 = std::env::var(DIES_AT).unwrap().parse().unwrap();
    let die = move |operation, _: &'static str, _: &Path| {
        if operation == nth {
            let own = rustix::process::getpid();
            let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
        }
    };
    faulty_storage(engine, Arc::new(Faults::new(0).call(die)))
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "> {line}").unwrap();
}

#[test]
#[ignore = "not a test: what the tests kill"]
fn child() {
    let Some(root) = std::env::var_os(ROOT) else {
        return;
    };
    let engine = std::env::var(ENGINE).unwrap().parse().unwrap();
    let options = dying(engine);
    let mut note = |said: Note| say(&said.to_string());
    let mut program = Program::new(Path::new(&root), options, &mut note);
    match std::env::var(RANK) {
        Err(_) => PROGRAM.iter().for_each(|call| program.call(*call).unwrap()),
        Ok(rank) => run_rank(&mut program, rank.parse().unwrap()),
    }
}

/// A child process and its output.
struct Running {
    child: Child,
    said: BufReader<ChildStdout>,
    asked: ChildStdin,
}

impl Running {
    fn start(root: &Path, engine: EngineChoice, dies_at: u64, rank: Option<u32>) -> Running {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["every_step::child", "--exact", "--ignored", "--nocapture"])
            .env(ROOT, root)
            .env(ENGINE, engine.to_string())
            .env(DIES_AT, dies_at.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(rank) = rank {
            command.env(RANK, rank.to_string());
        }
        let mut child = command.spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        let asked = child.stdin.take().unwrap();
        Running { child, said, asked }
    }

    /// The next line of its output; `None` once it is dead.
    fn next(&mut self) -> Option<String> {
        let lines = (&mut self.said).lines().map_while(std::result::Result::ok);
        // The test harness may have begun a line of its own.
        let mut said = lines.filter_map(|line| Some(line.split_once("> ")?.1.to_owned()));
        said.next()
    }

    fn report(&mut self, line: &str) {
        // The child may be dead by now.
        let _ = writeln!(self.asked, "{line}");
    }

    /// Whether it was killed, as opposed to ended or failed.
    fn was_killed(mut self) -> bool {
        drop(self.asked);
        let status = self.child.wait().unwrap();
        let is_killed = status.signal() == Some(SIGKILL);
        assert!(is_killed || status.success(), "{status}");
        is_killed
    }
}

#[test]
fn each_operation_is_the_last_of_a_process() {
    for &engine in engines() {
        for nth in 1.. {
            let what = format!("{engine:?} killed before operation {nth}");
            let root = tempfile::tempdir().unwrap();
            let mut running = Running::start(root.path(), engine, nth, None);
            let mut notes: Vec<Note> = Vec::new();
            while let Some(line) = running.next() {
                notes.push(line.parse().unwrap());
            }
            let is_killed = running.was_killed();
            check_swept(root.path(), &notes, &what);
            if !is_killed {
                eprintln!("{engine}: killed before each of {} operations", nth - 1);
                assert!(nth > 60);
                break;
            }
        }
    }
}

/// One of two ranks, which receives the other's messages: the first begins and commits, the second
/// joins.
fn run_rank(program: &mut Program<'_>, rank: u32) {
    let publication = step_publication(&program.store, 2, false);
    let (options, progress) = (&program.options, Progress::default());
    let mut lines = std::io::stdin().lines();
    // The other rank may be dead: then there is nothing to commit.
    let mut listen = || lines.next().and_then(std::result::Result::ok);
    let state = sample(u64::from(rank) + 2).state();
    if rank == 0 {
        let mut attempt =
            Attempt::begin(&publication.path, false, &options.file_system, &progress).unwrap();
        say(&format!("attempt {}", attempt.id()));
        let written = write_rank(&mut attempt, 0, state, options, &progress).unwrap();
        let Some(vote) = listen() else { return };
        let vote: PartEntry = serde_json::from_str(&vote).unwrap();
        commit(attempt, &publication, vec![written.part, vote]).unwrap();
        (program.note)(Note::Saved(2, vec![2, 3]));
    } else {
        let Some(id) = listen() else { return };
        let joined = Attempt::join(&publication.path, &id, &options.file_system, &progress);
        let mut attempt = match joined {
            // The coordinator failed and removed its directory.
            Err(Error::NotFound { .. }) => return,
            joined => joined.unwrap(),
        };
        let written = write_rank(&mut attempt, rank, state, options, &progress).unwrap();
        say(&serde_json::to_string(&written.part).unwrap());
        // The lease is held until the outcome of the attempt is known.
        let _ = listen();
    }
}

/// Two ranks save a step together, and one of them dies before each of its operations in turn.
#[test]
fn each_operation_is_the_last_of_a_rank() {
    for &engine in engines() {
        for dying in [0, 1] {
            for nth in 1.. {
                let what = format!("{engine:?} rank {dying} killed before operation {nth}");
                let root = tempfile::tempdir().unwrap();
                let mut notes = Vec::new();
                let mut note = |said| notes.push(said);
                let mut program = Program::new(root.path(), Options::default(), &mut note);
                program.call(Call::Save(1, 1)).unwrap();
                notes.push(Note::Saving(2, vec![2, 3]));

                let dies_at = |rank| if rank == dying { nth } else { 0 };
                let start = |rank| Running::start(root.path(), engine, dies_at(rank), Some(rank));
                let (mut first, mut second) = (start(0), start(1));
                if let Some(line) = first.next() {
                    second.report(line.strip_prefix("attempt ").unwrap());
                    if let Some(vote) = second.next() {
                        first.report(&vote);
                        if let Some(line) = first.next() {
                            notes.push(line.parse().unwrap());
                        }
                    }
                }
                let killed = [first, second].map(Running::was_killed);
                check_swept(root.path(), &notes, &what);
                if !killed.contains(&true) {
                    assert!(notes.contains(&Note::Saved(2, vec![2, 3])), "{what}");
                    eprintln!(
                        "{engine}: rank {dying} killed before each of {} operations",
                        nth - 1
                    );
                    break;
                }
                // The step can be saved after any outcome.
                let mut note = |said| notes.push(said);
                let mut program = Program::new(root.path(), Options::default(), &mut note);
                program.call(Call::Replace(2, 5)).unwrap();
                check_swept(root.path(), &notes, &what);
            }
        }
    }
}
