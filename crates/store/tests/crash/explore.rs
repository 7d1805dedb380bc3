//! Laying out the states that a crash can leave, and checking them.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use penstock_io::faulty::crash::{Image, states};
use penstock_store::Progress;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::save::Publication;
use penstock_store::steps::store::Store;

use crate::common::expect::{Expected, Note};
use crate::common::{Sample, names, publication, sealed};
use crate::scenario::World;

/// Limits of an exploration.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Maximum number of states per moment.
    pub(crate) states_per_moment: u64,
    /// The seed of samples.
    pub(crate) seed: u64,
    /// Whether leaving a state out is an error.
    pub(crate) must_be_exhaustive: bool,
    /// Whether to stop at the first violation.
    pub(crate) stop_at_violation: bool,
}

/// The result of an exploration.
#[derive(Default)]
pub(crate) struct Exploration {
    pub(crate) moments: usize,
    pub(crate) states: u64,
    /// States that differ in the stored data or in the promises.
    pub(crate) distinct: usize,
    pub(crate) violations: Vec<String>,
}

/// Violations are similar: a few suffice.
const VIOLATIONS_MAX: usize = 5;

/// Checks every state that a power cut at any moment of the scenario could leave.
pub(crate) fn explore(world: &World, limits: Limits) -> Exploration {
    let mut explorer = Explorer::new(world);
    let mut found = Exploration::default();
    let notes = world.notes();
    for position in world.begun..=world.log.position() {
        let made = notes.iter().filter(|(at, _)| *at <= position);
        let expected = Expected::after(made.map(|(_, note)| note));
        let mut visit = |image: &Image| {
            if let Err(violation) = explorer.check_image(image, &expected) {
                let root = explorer.directory.path().to_string_lossy();
                let violation = violation.replace(&*root, "");
                found
                    .violations
                    .push(format!("moment {position}: {violation}"));
            }
            let wanted = if limits.stop_at_violation {
                1
            } else {
                VIOLATIONS_MAX
            };
            match found.violations.len() < wanted {
                true => ControlFlow::Continue(()),
                false => ControlFlow::Break(()),
            }
        };
        let coverage = states(
            &world.log,
            position,
            limits.states_per_moment,
            limits.seed,
            &mut visit,
        );
        assert!(
            coverage.is_exhaustive || !limits.must_be_exhaustive,
            "moment {position} has more than {} states",
            limits.states_per_moment
        );
        found.moments += 1;
        found.states += coverage.visited;
        if limits.stop_at_violation && !found.violations.is_empty() {
            break;
        }
    }
    found.distinct = explorer.seen.len();
    found
}

struct Explorer {
    /// In memory if possible: nothing here needs to be durable.
    directory: tempfile::TempDir,
    recovery: tempfile::TempDir,
    laid_out: Image,
    store_path: PathBuf,
    samples: HashMap<u64, Sample>,
    after: Sample,
    options: Options,
    seen: HashSet<u64>,
    recovered: HashSet<u64>,
}

pub(crate) fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = tempfile::tempdir_in(memory);
    made.or_else(|_| tempfile::tempdir()).unwrap()
}

/// The files in a step's directory, except its protection.
fn files(path: &Path) -> Vec<String> {
    let mut files = names(path);
    files.retain(|name| name != "protected");
    files
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Explorer {
    fn new(world: &World) -> Explorer {
        let seeds = world.notes().into_iter().flat_map(|(_, note)| match note {
            Note::Saving(_, seeds) => seeds,
            _ => Vec::new(),
        });
        Explorer {
            directory: scratch(),
            recovery: scratch(),
            laid_out: Image::default(),
            store_path: world.store_path(),
            samples: seeds.map(|seed| (seed, world.sample(seed))).collect(),
            after: world.sample(99),
            options: world.reading(),
            seen: HashSet::new(),
            recovered: HashSet::new(),
        }
    }

    fn check_image(&mut self, image: &Image, expected: &Expected) -> Result<(), String> {
        if !self.seen.insert(hash((image, expected))) {
            return Ok(());
        }
        let root = self.directory.path();
        image.materialise(root, &self.laid_out).unwrap();
        self.laid_out = image.clone();
        let store = Store::new(root.join(&self.store_path));
        let held = expected.check(&store, &self.samples, &self.options)?;
        // Recovery depends on names and on which checkpoints are complete, not on other bytes.
        let paths: Vec<&PathBuf> = image.entries.keys().collect();
        if self.recovered.insert(hash((paths, &held, expected))) {
            self.recover(image, expected, &held)?;
        }
        Ok(())
    }

    /// The store recovers: a sweep removes dead files and nothing else, and every step can be saved
    /// again.
    fn recover(
        &self,
        image: &Image,
        expected: &Expected,
        held: &BTreeMap<u64, Vec<u64>>,
    ) -> Result<(), String> {
        let root = self.recovery.path();
        image.materialise(root, &Image::default()).unwrap();
        let store = Store::new(root.join(&self.store_path));
        let result = self.sweep_and_save(&store, expected, held);
        for entry in std::fs::read_dir(root).unwrap() {
            std::fs::remove_dir_all(entry.unwrap().path()).unwrap();
        }
        result
    }

    fn sweep_and_save(
        &self,
        store: &Store,
        expected: &Expected,
        held: &BTreeMap<u64, Vec<u64>>,
    ) -> Result<(), String> {
        store.sweep().map_err(|error| error.full_message())?;
        let after = expected.check(store, &self.samples, &self.options)?;
        if after != *held {
            return Err(format!("a sweep made {after:?} of {held:?}"));
        }
        for step in store.steps().map_err(|error| error.full_message())? {
            let path = store.step_path(step);
            let ranks = held.get(&step).map_or(0, Vec::len);
            let referenced = match Checkpoint::open(&path) {
                // Sidecars exist twice, as a file of the attempt and as a copy.
                Ok(checkpoint) => checkpoint.files().len() + checkpoint.manifest().sidecars.len(),
                Err(error) => return Err(format!("after a sweep: {}", error.full_message())),
            };
            let left = files(&path);
            if left.len() != referenced || ranks == 0 {
                return Err(format!("a sweep of step {step} leaves {left:?}"));
            }
        }
        for &step in expected.steps.keys() {
            let path = store.step_path(step);
            let publication = Publication {
                step: Some(step),
                overwrite: true,
                ..publication(&path)
            };
            let state = self.after.state();
            let saved = sealed::save(state, &publication, &self.options, &Progress::default());
            saved.map_err(|error| format!("the next save: {}", error.full_message()))?;
            self.after.assert_at(&path);
            let saved = Checkpoint::open(&path).unwrap();
            let left = files(&path);
            if left.len() != saved.files().len() {
                return Err(format!("the next save of step {step} leaves {left:?}"));
            }
        }
        Ok(())
    }
}
