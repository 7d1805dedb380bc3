//! A bucket, the clients that work in it, and an observer.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;

use penstock_io::file_system::FileSystem;
use penstock_object::{Address, Objects, Remote};
use penstock_object_server::{Bucket, Call, Entry, Fault, OBSERVER, Server};
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::save::Publication;
use penstock_store::steps::store::{StepState, Store};
use penstock_store::steps::sweep::Sweep;
use penstock_store::{Error, Progress, Result};

use crate::common::{Sample, publication, sealed, served};
use crate::history::{Happened, History, Op, Outcome};
use crate::mutate::{Mutated, Mutation};

pub(crate) static SERVER: LazyLock<Server> = LazyLock::new(served::start);

/// Unused buckets, the most recently used last: background work of a run then does not reach the
/// next ones.
static PLACES: Mutex<VecDeque<Place>> = Mutex::new(VecDeque::new());

const PLACES_IDLE: usize = 8;

static PLACES_MADE: AtomicUsize = AtomicUsize::new(0);

/// A bucket's name and its clients, which take longer to create than a run.
struct Place {
    name: String,
    clients: HashMap<&'static str, (Store, Options)>,
}

impl Place {
    fn take() -> Place {
        let mut idle = PLACES.lock().unwrap();
        let oldest = match idle.len() > PLACES_IDLE {
            true => idle.pop_front(),
            false => None,
        };
        oldest.unwrap_or_else(|| Place {
            name: format!("run-{}", PLACES_MADE.fetch_add(1, Ordering::Relaxed)),
            clients: HashMap::new(),
        })
    }

    fn client(&mut self, name: &'static str) -> (Store, Options) {
        let made = || open(&self.name, name);
        self.clients.entry(name).or_insert_with(made).clone()
    }
}

/// How long a request is retried.
const PATIENCE: Duration = Duration::from_millis(80);

/// Longer than any abandoned attempt may live.
pub(crate) const DEAD: Duration = Duration::from_secs(3 * 24 * 60 * 60);

/// A client that is inactive for so long that others take it for dead, and then continues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stalled {
    /// Number of its earlier requests.
    pub(crate) after: usize,
}

/// Duration of every request by the clock of the store.
const REQUEST: Duration = Duration::from_secs(1);

/// Sizes of a state's tensors: one request, whatever the options.
const SIZES: &[usize] = &[600];

/// Seeds of the states that scenarios save.
const SEEDS: std::ops::Range<u64> = 1..6;

static SAMPLES: LazyLock<HashMap<u64, Sample>> = LazyLock::new(|| {
    SEEDS
        .map(|seed| (seed, Sample::seeded_rank(seed, SIZES)))
        .collect()
});

/// A bucket, and the events in it.
pub(crate) struct World {
    pub(crate) bucket: Arc<Bucket>,
    histories: Mutex<BTreeMap<u64, History>>,
    violations: Mutex<Vec<String>>,
    /// The states of acknowledged checkpoints, by id.
    saved: Mutex<HashMap<String, u64>>,
    /// The number of changes at the last observation.
    seen: Mutex<u64>,
    /// Steps whose marks were acknowledged.
    marked: Mutex<Vec<u64>>,
    place: Mutex<Place>,
    observer: Store,
    reading: Options,
    /// Whether a client may be taken for dead.
    may_sweep: bool,
}

impl World {
    /// Creates a world; one of its clients may be stalled.
    pub(crate) fn new(stalled: Option<Stalled>) -> Arc<World> {
        let mut place = Place::take();
        let bucket = SERVER.make_bucket(&place.name);
        let (observer, reading) = place.client(OBSERVER);
        let world = Arc::new(World {
            bucket,
            histories: Mutex::default(),
            violations: Mutex::default(),
            saved: Mutex::default(),
            seen: Mutex::new(0),
            place: Mutex::new(place),
            observer,
            reading,
            may_sweep: stalled.is_some(),
            marked: Mutex::default(),
        });
        let inside = Arc::downgrade(&world);
        world.bucket.between(move || {
            if let Some(world) = inside.upgrade() {
                let is_stalled = |stalled: Stalled| stalled.after == world.bucket.requests();
                world.bucket.pass(match stalled.is_some_and(is_stalled) {
                    true => DEAD,
                    false => REQUEST,
                });
                world.inspect();
            }
        });
        world
    }

    pub(crate) fn client(
        self: &Arc<World>,
        name: &'static str,
        mutation: Option<Mutation>,
    ) -> Client {
        let (mut store, mut options) = self.place.lock().unwrap().client(name);
        if let Some(mutation) = mutation {
            let mutated = Mutated::new(&options.file_system, mutation, &self.bucket, name);
            let mutated: Arc<dyn FileSystem> = Arc::new(mutated);
            store = store.with_file_system(Arc::clone(&mutated));
            options.file_system = mutated;
        }
        Client {
            world: Arc::clone(self),
            name,
            store,
            options,
        }
    }

    fn history<T>(&self, step: u64, change: impl FnOnce(&mut History) -> T) -> T {
        let mut histories = self.histories.lock().unwrap();
        change(histories.entry(step).or_default())
    }

    pub(crate) fn violate(&self, what: String) {
        self.violations.lock().unwrap().push(what);
    }

    /// Reads every step that was used, unless nothing has changed.
    pub(crate) fn inspect(&self) {
        let changes = self.bucket.changes();
        let last = std::mem::replace(&mut *self.seen.lock().unwrap(), changes);
        if last == changes {
            return;
        }
        let steps: Vec<u64> = self.histories.lock().unwrap().keys().copied().collect();
        for step in steps {
            match self.value(step) {
                Ok(value) => self.history(step, |history| history.saw(value)),
                Err(Flaw::LacksData(_)) => self.history(step, History::saw_broken),
                Err(flaw) => self.violate(format!("step {step}: {flaw}")),
            }
        }
    }

    /// The state of a step, read back bit for bit.
    fn value(&self, step: u64) -> std::result::Result<Option<u64>, Flaw> {
        match self.observer.state(step) {
            Ok(StepState::Complete(checkpoint)) => identify(&checkpoint, &self.reading).map(Some),
            Ok(StepState::Incomplete) | Err(Error::NotFound { .. }) => Ok(None),
            Ok(StepState::Damaged(error)) => Err(Flaw::LacksData(error)),
            Ok(StepState::Newer(error) | StepState::Unreadable(error)) | Err(error) => {
                Err(Flaw::Other(error.full_message()))
            }
        }
    }

    /// Checks that only the files of complete checkpoints are left.
    fn check_left(&self) -> std::result::Result<(), String> {
        let mut left: BTreeSet<String> = self.bucket.objects().into_keys().collect();
        left.remove("store/verified.json");
        for step in self
            .observer
            .steps()
            .map_err(|error| error.full_message())?
        {
            let path = self.observer.step_path(step);
            if let Ok(StepState::Complete(checkpoint)) = self.observer.state(step) {
                for (name, _) in checkpoint.files() {
                    left.remove(&key_of(&path.join(name)));
                }
            }
        }
        let uploads = self.bucket.uploads();
        let uploads: Vec<&String> = uploads.values().map(|upload| &upload.key).collect();
        match left.is_empty() && uploads.is_empty() {
            true => Ok(()),
            false => Err(format!(
                "a sweep leaves {left:?} and uploads of {uploads:?}"
            )),
        }
    }

    /// Waits until all requests have arrived, and sweeps dead attempts; returns all violations.
    pub(crate) fn end(&self) -> Vec<String> {
        self.inspect();
        SERVER.apply_late(&self.bucket);
        self.inspect();
        match self.observer.marks() {
            Ok(marks) => {
                let is_there = |step: &u64| marks.iter().any(|mark| mark.step == *step);
                let marked = self.marked.lock().unwrap();
                for lost in marked.iter().filter(|step| !is_there(step)) {
                    self.violate(format!("the mark of step {lost} is lost"));
                }
            }
            Err(error) => self.violate(format!("the marks: {}", error.full_message())),
        }
        self.bucket.pass(DEAD);
        match self.observer.sweep() {
            Ok(_) => self.inspect(),
            Err(error) => self.violate(format!("the last sweep: {}", error.full_message())),
        }
        if let Err(why) = self.check_left() {
            self.violate(why);
        }
        let clients = std::mem::take(&mut self.place.lock().unwrap().clients);
        let name = self.bucket.name().to_owned();
        PLACES.lock().unwrap().push_back(Place { name, clients });
        let mut violations = std::mem::take(&mut *self.violations.lock().unwrap());
        let is_manifest =
            |entry: &&Entry| entry.call == Call::Put && entry.key.ends_with("/manifest.json");
        let journal = self.bucket.journal();
        let faults = journal.iter().filter(is_manifest);
        let faults: Vec<Fault> = faults.filter_map(|entry| entry.fault).collect();
        let is_late = |fault: &Fault| matches!(fault, Fault::Late(_));
        let what = Happened {
            is_late: faults.iter().any(is_late),
            is_disowned: faults.iter().any(|fault| {
                let is_disowned = matches!(fault, Fault::Disowned(_) | Fault::Doubled);
                is_disowned || is_late(fault)
            }),
        };
        for (step, history) in self.histories.lock().unwrap().iter() {
            let why = history.check(what).err();
            violations.extend(why.map(|why| format!("step {step}: {why}")));
        }
        violations
    }
}

/// A path in a bucket, as a key.
fn key_of(path: &Path) -> String {
    let url = path.to_string_lossy();
    let (_, rest) = url.split_once("://").unwrap();
    rest.split_once('/').unwrap().1.to_owned()
}

/// A store in a bucket, with a client's own connections.
fn open(bucket: &str, name: &str) -> (Store, Options) {
    let root = PathBuf::from(served::url(bucket, "store"));
    let address = Address::of(&root).unwrap().unwrap();
    let remote = Remote {
        patience: Some(PATIENCE),
        ..served::remote(&SERVER.endpoint(), name)
    };
    let objects = Arc::new(Objects::open(address, &remote).unwrap());
    let options = Options {
        io_threads: Some(1),
        queue_depth: Some(1),
        ..Options::default()
    };
    let options = options.on(&objects);
    let store = Store::new(root).with_file_system(Arc::clone(&options.file_system));
    (store, options)
}

/// Why the state of a step cannot be identified.
enum Flaw {
    LacksData(Error),
    Other(String),
}

impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Flaw::LacksData(error) => f.write_str(&error.full_message()),
            Flaw::Other(why) => f.write_str(why),
        }
    }
}

fn identify(checkpoint: &Checkpoint, options: &Options) -> std::result::Result<u64, Flaw> {
    let flaw = |error| match error {
        Error::Corrupt { .. } => Flaw::LacksData(error),
        error => Flaw::Other(error.full_message()),
    };
    let unsealed = sealed::opened(checkpoint, options).map_err(flaw)?;
    let checkpoint = unsealed.as_ref().unwrap_or(checkpoint);
    let loaded = checkpoint.load(None, HashMap::new(), options, &Progress::default());
    let loaded = loaded.map_err(flaw)?;
    let names = || checkpoint.part().tensors.iter().map(|tensor| &tensor.name);
    let is = |sample: &Sample| {
        sample.is(&loaded) && names().eq(sample.specs.iter().map(|spec| &spec.name))
    };
    let found = SAMPLES.iter().find(|(_, sample)| is(sample));
    found
        .map(|(seed, _)| *seed)
        .ok_or_else(|| Flaw::Other("it is a state that nobody saved".to_owned()))
}

/// A client of the store.
pub(crate) struct Client {
    pub(crate) world: Arc<World>,
    pub(crate) name: &'static str,
    store: Store,
    options: Options,
}

impl Client {
    fn is_dead(&self) -> bool {
        self.world.bucket.is_dead(self.name)
    }

    /// Performs an operation, and records its outcome.
    fn note<T>(
        &self,
        step: u64,
        op: Op,
        work: impl FnOnce() -> Result<T>,
        outcome: impl FnOnce(&Result<T>) -> Outcome,
    ) -> Result<T> {
        let index = self.world.history(step, |history| history.begin(op));
        let result = work();
        let outcome = match outcome(&result) {
            // A dead client reports nothing.
            Outcome::Refused | Outcome::Failed if self.is_dead() => Outcome::Open,
            outcome => outcome,
        };
        self.world
            .history(step, |history| history.end(index, outcome));
        result
    }

    fn publish(&self, step: u64, seed: u64, overwrite: bool) -> Result<()> {
        let publication = Publication {
            step: Some(step),
            overwrite,
            ..publication(&self.store.step_path(step))
        };
        let state = SAMPLES[&seed].state();
        let op = match overwrite {
            true => Op::Overwrite(seed),
            false => Op::Create(seed),
        };
        // Sealed and clear checkpoints replace each other.
        let options = Options {
            is_sealed: seed.is_multiple_of(2),
            ..self.options.clone()
        };
        let work = || sealed::save(state, &publication, &options, &Progress::default());
        self.note(step, op, work, |result| match result {
            Ok(report) => {
                let mut saved = self.world.saved.lock().unwrap();
                saved.insert(report.id.clone(), seed);
                Outcome::Done
            }
            Err(Error::Exists { .. }) => Outcome::Refused,
            Err(Error::CommitUndecided { .. }) => Outcome::Open,
            Err(error) if self.is_taken_back(error) => Outcome::Swept,
            Err(_) => Outcome::Failed,
        })
        .map(drop)
        .or_else(unless_refused)
        .or_else(|error| match self.is_taken_back(&error) {
            true => Ok(()),
            false => Err(error),
        })
    }

    /// Whether a save returned that it was taken for dead, where that can happen, or that it was
    /// deleted while it ran.
    fn is_taken_back(&self, error: &Error) -> bool {
        let reported = error.full_message();
        let is_swept =
            reported.contains("took this save for dead") || reported.contains("upload is gone");
        is_swept && (self.world.may_sweep || reported.contains("/deleted-"))
    }

    pub(crate) fn save(&self, step: u64, seed: u64) -> Result<()> {
        self.publish(step, seed, false)
    }

    pub(crate) fn overwrite(&self, step: u64, seed: u64) -> Result<()> {
        self.publish(step, seed, true)
    }

    pub(crate) fn delete(&self, step: u64) -> Result<()> {
        let work = || self.store.delete(step);
        let deleted = self.note(step, Op::Delete, work, deleted);
        deleted.map(drop).or_else(unless_refused)
    }

    /// Retention after a save.
    pub(crate) fn retain(&self, keep_last: u64, saved: u64) -> Result<()> {
        let plan = self
            .store
            .plan_retention(Some(keep_last), None, Some(saved))?;
        for verdict in plan {
            let Some(doomed) = verdict.doomed else {
                continue;
            };
            let seed = self.world.saved.lock().unwrap().get(&doomed.id).copied();
            let doomed = [(verdict.step, doomed.id)];
            self.note(
                verdict.step,
                seed.map_or(Op::Delete, Op::Retire),
                || self.store.retire(&doomed),
                |result| match result {
                    Ok(gone) if gone.is_empty() => Outcome::Open,
                    result => deleted(result),
                },
            )?;
        }
        Ok(())
    }

    /// Marks the present checkpoint of a step as read back.
    pub(crate) fn mark(&self, step: u64) -> Result<()> {
        let id = self.store.identity(step)?.unwrap_or_default();
        self.store.mark_verified(step, &id)?;
        // Marks are a hint: if the manifest is unreadable none is written, without an error.
        let marks = self.store.marks()?;
        if marks.iter().any(|mark| mark.step == step) {
            self.world.marked.lock().unwrap().push(step);
        }
        Ok(())
    }

    /// Leaves files as a dead save does.
    pub(crate) fn leave(&self, step: u64, number: u64) -> Result<()> {
        let names = [
            format!("shard-00000-00.{number:032x}.safetensors"),
            format!("part-00000.{number:032x}.json"),
        ];
        for name in names {
            let path = self.store.step_path(step).join(name);
            self.world.bucket.put(&key_of(&path), "left");
        }
        Ok(())
    }

    /// Removes files older than an age, however low.
    pub(crate) fn sweep(&self, age: Duration) -> Result<()> {
        let sweep = Sweep {
            age,
            is_forced: true,
        };
        self.store.sweep_as(&sweep).map(drop)
    }

    /// Loads a step, if it exists.
    pub(crate) fn load(&self, step: u64) -> Result<()> {
        let work = || {
            let path = self.store.step_path(step);
            let checkpoint = sealed::open(&path, &self.options.file_system)?;
            Ok(identify(&checkpoint, &self.options))
        };
        let result = self.note(step, Op::Load, work, |result| match result {
            Ok(Ok(seed)) => Outcome::FileStat(Some(*seed)),
            Err(Error::NotFound { .. } | Error::Incomplete { .. }) => Outcome::FileStat(None),
            _ => Outcome::Open,
        });
        // Files removed by a deletion during a load are missing; the load never returns another
        // state.
        if let Ok(Err(Flaw::Other(why))) = &result
            && why.contains("nobody saved")
        {
            self.world.violate(format!("a load: {why}"));
        }
        result.map(drop).or_else(unless_refused)
    }
}

/// Answers that a step exists, or does not, are no violation.
fn unless_refused(error: Error) -> Result<()> {
    match error {
        Error::Exists { .. } | Error::NotFound { .. } | Error::Incomplete { .. } => Ok(()),
        // A deletion blocked by a save stops, or retention skips the step.
        Error::Storage { source, .. } if source.kind() == io::ErrorKind::ResourceBusy => Ok(()),
        // A save is in progress where there is no checkpoint: its files cannot be distinguished
        // from those of a dead one.
        Error::Undecided { .. } => Ok(()),
        // Somebody has deleted the new manifest before the save checked it.
        Error::CommitUndecided { source, .. } if source.kind() == io::ErrorKind::NotFound => Ok(()),
        error => Err(error),
    }
}

/// A deletion that fails is resumed by the next one.
fn deleted<T>(result: &Result<T>) -> Outcome {
    match result {
        Ok(_) => Outcome::Done,
        Err(Error::NotFound { .. }) => Outcome::Refused,
        Err(_) => Outcome::Open,
    }
}
