//! Scenarios: calls on a store while its operations are logged.

use std::io::ErrorKind::ResourceBusy;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use penstock_io::engine::{EngineChoice, EngineConfig, Opened, open};
use penstock_io::faulty::{Faults, Faulty, FaultyFileSystem, Log};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem, Native};
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::save::{Attempt, Publication, SaveState, commit, save, write_rank};
use penstock_store::steps::scrub::Scrub;
use penstock_store::steps::store::Store;
use penstock_store::{Error, Progress, Result};

use crate::common::expect::Note;
use crate::common::{Rng, Sample, draw, forge, held, publication, sealed, sidecars};
use crate::explore::scratch;
use crate::mutate::Mutant;

const EPERM: i32 = 1;

/// A sequence of calls, and the previous contents of the store.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Which states of a moment are checked: all, or a sample.
    pub(crate) states: States,
    pub(crate) set_up: fn(&mut World) -> Result<()>,
    pub(crate) run: fn(&mut World) -> Result<()>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum States {
    Every,
    Sampled(u64),
}

pub(crate) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "first save",
        states: States::Every,
        set_up: |_| Ok(()),
        run: |world| world.save(1, 1, false),
    },
    Scenario {
        name: "second save",
        states: States::Every,
        set_up: |world| world.save(1, 1, false),
        run: |world| world.save(2, 2, false),
    },
    Scenario {
        name: "overwrite",
        states: States::Every,
        set_up: |world| world.save(1, 1, false),
        run: |world| world.save(1, 2, true),
    },
    Scenario {
        name: "retention",
        states: States::Every,
        set_up: |world| world.save(1, 1, false),
        run: |world| {
            world.save(2, 2, false)?;
            world.retain(1, 2)
        },
    },
    Scenario {
        name: "save of a model",
        states: States::Sampled(256),
        set_up: |_| Ok(()),
        run: |world| world.save_model(1, 1, false),
    },
    Scenario {
        name: "overwrite where nothing is",
        states: States::Sampled(256),
        set_up: |_| Ok(()),
        run: |world| world.save_model(1, 1, true),
    },
    Scenario {
        name: "overwrite of a model",
        states: States::Sampled(256),
        set_up: |world| world.save_model(1, 1, false),
        run: |world| world.save_model(1, 2, true),
    },
    Scenario {
        name: "delete of a model",
        states: States::Sampled(256),
        set_up: |world| {
            world.save(1, 1, false)?;
            world.save_model(2, 2, false)
        },
        run: |world| world.delete(2),
    },
    Scenario {
        name: "two ranks",
        states: States::Every,
        set_up: |_| Ok(()),
        run: |world| world.save_ranks(1, &[1, 2], false),
    },
    Scenario {
        name: "delete",
        states: States::Every,
        set_up: |world| {
            world.save(1, 1, false)?;
            world.save(2, 2, false)
        },
        run: |world| world.delete(1),
    },
    Scenario {
        name: "save after a dead one",
        states: States::Every,
        // A save created the directory, and died before that was durable.
        set_up: |world| {
            world.save(1, 1, false)?;
            let path = world.store.step_path(2);
            let made = world
                .options
                .file_system
                .change(Change::CreateDirectory(&path));
            Ok(made?)
        },
        run: |world| world.save(2, 2, false),
    },
    Scenario {
        name: "sweep after a lost sync",
        states: States::Every,
        // A save published, and died before that was durable.
        set_up: |world| {
            world.save(1, 1, false)?;
            world.mutant.fail(("sync step", 2));
            world.save(1, 2, true).expect_err("its last sync failed");
            Ok(())
        },
        run: |world| world.sweep(),
    },
    Scenario {
        name: "mark",
        states: States::Every,
        set_up: set_up_marks,
        run: |world| world.mark(2, false),
    },
    Scenario {
        name: "protect",
        states: States::Every,
        set_up: set_up_marks,
        run: |world| world.protect(2, true),
    },
    Scenario {
        name: "mark as damaged",
        states: States::Every,
        set_up: set_up_marks,
        run: |world| world.mark(1, true),
    },
    Scenario {
        name: "unprotect",
        states: States::Every,
        set_up: set_up_marks,
        run: |world| world.protect(1, false),
    },
    Scenario {
        name: "delete a protected one",
        states: States::Every,
        set_up: set_up_marks,
        run: |world| world.delete_protected(1),
    },
    Scenario {
        name: "retention beside a mark",
        states: States::Every,
        set_up: |world| {
            set_up_marks(world)?;
            world.protect(1, false)
        },
        run: |world| {
            world.save(3, 3, false)?;
            world.retain(1, 3)
        },
    },
    Scenario {
        name: "overwrite by two ranks",
        states: States::Sampled(1 << 9),
        set_up: |world| world.save_ranks(1, &[1, 2], false),
        run: |world| world.save_ranks(1, &[3, 4], true),
    },
    Scenario {
        name: "save without links",
        states: States::Every,
        set_up: |world| world.save(1, 1, false),
        run: |world| {
            world.mutant.fail_with(("publish", 1), EPERM);
            world.save(2, 2, false)
        },
    },
    Scenario {
        name: "save below a dead one's root",
        states: States::Every,
        set_up: |world| {
            let root = world.store.root().to_owned();
            Ok(world
                .options
                .file_system
                .change(Change::CreateDirectory(&root))?)
        },
        run: |world| world.save(1, 1, false),
    },
    Scenario {
        name: "save again after a lost sync",
        states: States::Every,
        set_up: lose_the_last_sync,
        run: |world| world.save(2, 2, false),
    },
    Scenario {
        name: "retention after a lost sync",
        states: States::Every,
        set_up: lose_the_last_sync,
        run: |world| world.retain(1, 2),
    },
    Scenario {
        name: "delete again after a lost sync",
        states: States::Every,
        set_up: |world| {
            world.save(1, 1, false)?;
            world.save(2, 2, false)?;
            world.mutant.fail(("sync store", 1));
            world.delete(1).expect_err("its last sync failed");
            Ok(())
        },
        run: |world| world.delete(1),
    },
    Scenario {
        name: "delete after a lost unprotect",
        states: States::Every,
        set_up: |world| {
            set_up_marks(world)?;
            world.mutant.fail(("sync step", 1));
            world.protect(1, false).expect_err("its sync failed");
            Ok(())
        },
        run: |world| world.delete(1),
    },
    Scenario {
        name: "mark again after a lost sync",
        states: States::Every,
        set_up: |world| {
            world.save(1, 1, false)?;
            world.mutant.fail(("sync store", 1));
            world.mark(1, false).expect_err("its last sync failed");
            Ok(())
        },
        run: |world| world.mark(1, false),
    },
    Scenario {
        name: "sweep of a dead save",
        states: States::Every,
        set_up: |world| {
            world.save(1, 1, false)?;
            world.mutant.die(12);
            world.save(2, 2, false).expect_err("it died");
            world.mutant.revive();
            Ok(())
        },
        run: |world| world.sweep(),
    },
    Scenario {
        name: "scrub beside damage",
        states: States::Every,
        set_up: |world| {
            // Independent of the random options: this tests the data that loads return, not
            // verdicts.
            world.options.verify = false;
            world.save(1, 1, false)?;
            world.save(2, 2, false)?;
            world.damage(2)
        },
        run: |world| {
            world.scrub(&[(1, false), (2, true)])?;
            world.retain(1, 2)
        },
    },
    Scenario {
        name: "delete without locks",
        states: States::Every,
        set_up: |world| {
            world.mutant.unlock();
            world.save(1, 1, false)?;
            world.save(2, 2, false)
        },
        run: |world| world.delete(1),
    },
    Scenario {
        name: "retention without locks",
        states: States::Every,
        set_up: |world| {
            world.mutant.unlock();
            world.save(1, 1, false)
        },
        run: |world| {
            world.save(2, 2, false)?;
            world.retain(1, 2)
        },
    },
    Scenario {
        name: "delete beside an overwrite",
        states: States::Sampled(1 << 9),
        set_up: |world| {
            world.mutant.unlock();
            world.save(1, 1, false)
        },
        // The save commits between the check of the manifest and its removal.
        run: |world| {
            let saving = world.saving(1, 2, true);
            world
                .mutant
                .meanwhile(("take manifest", 1), || saving().unwrap());
            match world.delete(1) {
                Err(Error::Storage { source, .. }) if source.kind() == ResourceBusy => Ok(()),
                result => panic!("another's manifest was taken for its own: {result:?}"),
            }
        },
    },
    Scenario {
        name: "quarantine",
        states: States::Every,
        set_up: set_up_damage,
        run: |world| world.quarantine(2),
    },
    Scenario {
        name: "save over a damaged one",
        states: States::Every,
        set_up: set_up_damage,
        run: |world| world.save_over(2, 3),
    },
    Scenario {
        name: "save over one half quarantined",
        states: States::Every,
        // It was renamed, and the process died before that was durable.
        set_up: |world| {
            set_up_damage(world)?;
            world.mutant.fail(("sync store", 1));
            world.quarantine(2).expect_err("its sync failed");
            world.mutant.revive();
            Ok(())
        },
        run: |world| world.save_over(2, 3),
    },
    Scenario {
        name: "save of a file",
        states: States::Every,
        set_up: |world| world.hold(1),
        run: |world| {
            world.save_held(1, 1, false)?;
            world.release_file(1)
        },
    },
    Scenario {
        name: "save of a file that goes at once",
        states: States::Every,
        set_up: |world| {
            world.save(1, 1, false)?;
            world.hold(2)
        },
        // The owner removes its name as soon as the file has the other one.
        run: |world| {
            let file_system = Arc::clone(&world.options.file_system);
            let held = world.held(2);
            world.mutant.meanwhile(("write part", 1), move || {
                file_system.change(Change::RemoveFile(&held)).unwrap();
            });
            world.save_held(2, 2, false)
        },
    },
    Scenario {
        name: "overwrite by a file",
        states: States::Every,
        set_up: |world| {
            world.save(1, 1, false)?;
            world.hold(2)
        },
        run: |world| {
            world.save_held(1, 2, true)?;
            world.release_file(2)
        },
    },
    Scenario {
        name: "two saves of one file",
        states: States::Every,
        set_up: |world| {
            world.hold(1)?;
            world.save_held(1, 1, false)
        },
        run: |world| {
            world.save_held(2, 1, false)?;
            world.delete(1)
        },
    },
    Scenario {
        name: "save after a failed one",
        // The states left by the failed save and by the next one multiply.
        states: States::Sampled(1 << 11),
        set_up: |world| world.save(1, 1, false),
        run: |world| {
            world.mutant.fail(("sync part", 1));
            world.save(2, 2, false).expect_err("a sync failed");
            world.save(2, 3, false)
        },
    },
];

/// Another step has a mark and a protection before, and keeps them.
fn set_up_marks(world: &mut World) -> Result<()> {
    world.save(1, 1, false)?;
    world.save(2, 2, false)?;
    world.mark(1, false)?;
    world.protect(1, true)
}

/// The newest step was found damaged.
fn set_up_damage(world: &mut World) -> Result<()> {
    world.save(1, 1, false)?;
    world.save(2, 2, false)?;
    world.mark(2, true)
}

/// The save of the second step published it, and failed to make that durable.
fn lose_the_last_sync(world: &mut World) -> Result<()> {
    world.save(1, 1, false)?;
    world.mutant.fail(("sync step", 2));
    world.save(2, 2, false).expect_err("its last sync failed");
    world.mutant.revive();
    Ok(())
}

/// A store of which every change is logged.
pub(crate) struct World {
    directory: tempfile::TempDir,
    pub(crate) store: Store,
    pub(crate) options: Options,
    pub(crate) mutant: Arc<Mutant>,
    pub(crate) log: Arc<Log>,
    notes: Arc<Mutex<Vec<(usize, Note)>>>,
    /// The start of the scenario itself.
    pub(crate) begun: usize,
    sizes: &'static [usize],
}

impl World {
    /// A few hundred bytes, which take one request whatever the options: few enough states to check
    /// all.
    pub(crate) fn new(mutant: Arc<Mutant>, random: &mut Rng) -> World {
        World::small(tempfile::tempdir().unwrap(), mutant, random)
    }

    /// A small world in memory, where a sync takes no time.
    pub(crate) fn in_memory(mutant: Arc<Mutant>, random: &mut Rng) -> World {
        World::small(scratch(), mutant, random)
    }

    fn small(directory: tempfile::TempDir, mutant: Arc<Mutant>, random: &mut Rng) -> World {
        let options = Options {
            is_sealed: random.below(2) == 1,
            ..draw::options(random, directory.path())
        };
        World::with(directory, Faults::new(0), mutant, &options, &[600])
    }

    /// Some mebibytes in several shards, written by two workers.
    pub(crate) fn large(engine: EngineChoice, seed: u64, random: &mut Rng) -> World {
        let directory = tempfile::tempdir().unwrap();
        let options = Options {
            engine,
            io_threads: Some(2),
            queue_depth: Some(4),
            extent_bytes: Some(1 << 20),
            shard_bytes: Some(2 << 20),
            is_sealed: random.below(2) == 1,
            ..draw::options(random, directory.path())
        };
        let faults = Faults::new(seed).late_completions(50).short_transfers(20);
        let sizes = &[1_500_000, 700, 1 << 20, 4096, 900_000];
        World::with(
            directory,
            faults,
            Arc::new(Mutant::default()),
            &options,
            sizes,
        )
    }

    fn with(
        directory: tempfile::TempDir,
        faults: Faults,
        mutant: Arc<Mutant>,
        options: &Options,
        sizes: &'static [usize],
    ) -> World {
        let log = Arc::new(Log::new(directory.path()));
        let faults = Arc::new(faults.record(Arc::clone(&log)));
        let recorded = FaultyFileSystem::new(Arc::new(Native), Arc::clone(&faults));
        let root = directory.path().join("store");
        let mutated: Arc<dyn FileSystem> =
            Arc::new(mutant.wrap(Arc::new(recorded), &root, directory.path()));
        let choice = options.engine;
        let factory = move |queue_depth| {
            let opened = open(&EngineConfig {
                choice,
                queue_depth,
            })?;
            Ok(Opened {
                engine: Box::new(Faulty::new(opened.engine, Arc::clone(&faults))),
                fallback: opened.fallback,
            })
        };
        World {
            store: Store::new(root).with_file_system(Arc::clone(&mutated)),
            directory,
            options: Options {
                engine_factory: Some(Arc::new(factory)),
                file_system: mutated,
                ..options.clone()
            },
            mutant,
            log,
            notes: Arc::default(),
            begun: 0,
            sizes,
        }
    }

    /// The path of the store, relative to the root of the log.
    pub(crate) fn store_path(&self) -> PathBuf {
        let root = self.store.root().strip_prefix(self.directory.path());
        root.unwrap().to_owned()
    }

    /// Ends the set-up.
    pub(crate) fn begin(&mut self) {
        self.begun = self.log.position();
    }

    fn note(&self, note: Note) {
        let now = (self.log.position(), note);
        self.notes.lock().unwrap().push(now);
    }

    /// The promises of its calls, on the log's clock.
    pub(crate) fn notes(&self) -> Vec<(usize, Note)> {
        self.notes.lock().unwrap().clone()
    }

    /// The same options, for reading the state left by a power cut, which is laid out in memory.
    pub(crate) fn reading(&self) -> Options {
        let direct = match self.options.direct {
            Direct::On => Direct::Auto,
            direct => direct,
        };
        Options {
            direct,
            engine_factory: None,
            file_system: Arc::new(Native),
            ..self.options.clone()
        }
    }

    /// The state of a seed.
    pub(crate) fn sample(&self, seed: u64) -> Sample {
        Sample::seeded_rank(seed, self.sizes)
    }

    fn publication(&self, step: u64, overwrite: bool) -> Publication {
        Publication {
            step: Some(step),
            overwrite,
            ..publication(&self.store.step_path(step))
        }
    }

    pub(crate) fn save(&mut self, step: u64, seed: u64, overwrite: bool) -> Result<()> {
        self.saving(step, seed, overwrite)()
    }

    /// The path of the file that contains the last tensor of a state.
    pub(crate) fn held(&self, seed: u64) -> PathBuf {
        self.directory.path().join("held").join(seed.to_string())
    }

    /// Creates that file, durably, as its owner does.
    pub(crate) fn hold(&mut self, seed: u64) -> Result<()> {
        let (bytes, _) = held::file_of(&self.sample(seed), 1);
        let (top, path) = (self.directory.path(), self.held(seed));
        let directory = top.join("held");
        let file_system = &self.options.file_system;
        if !directory.exists() {
            file_system.change(Change::CreateDirectory(&directory))?;
        }
        let file = file_system.create(&path, Direct::Off)?;
        file_system.change(Change::Write(&file, &bytes))?;
        file_system.change(Change::SyncData(&file))?;
        file_system.change(Change::SyncDirectory(&directory))?;
        Ok(file_system.change(Change::SyncDirectory(top))?)
    }

    /// Removes the owner's name of the file.
    pub(crate) fn release_file(&mut self, seed: u64) -> Result<()> {
        let file_system = &self.options.file_system;
        Ok(file_system.change(Change::RemoveFile(&self.held(seed)))?)
    }

    /// Saves a state whose last tensor is in a separate file.
    pub(crate) fn save_held(&mut self, step: u64, seed: u64, overwrite: bool) -> Result<()> {
        let state = held::state(&self.sample(seed), 1, &self.held(seed));
        let options = sealed::clear(&self.options);
        self.saving_state(step, seed, state, overwrite, options)()
    }

    /// A save that somebody else makes when it is called.
    pub(crate) fn saving(
        &self,
        step: u64,
        seed: u64,
        overwrite: bool,
    ) -> impl FnOnce() -> Result<()> + Send + use<> {
        let options = self.options.clone();
        self.saving_state(step, seed, self.sample(seed).state(), overwrite, options)
    }

    /// Saves a model with its sidecars.
    pub(crate) fn save_model(&mut self, step: u64, seed: u64, overwrite: bool) -> Result<()> {
        let publication = Publication {
            sidecars: sidecars(seed),
            ..self.publication(step, overwrite)
        };
        let state = self.sample(seed).grouped().state();
        self.note(Note::Saving(step, vec![seed]));
        let options = sealed::clear(&self.options);
        save(state, &publication, &options, &Progress::default())?;
        self.note(Note::Saved(step, vec![seed]));
        Ok(())
    }

    fn saving_state(
        &self,
        step: u64,
        seed: u64,
        state: SaveState,
        overwrite: bool,
        options: Options,
    ) -> impl FnOnce() -> Result<()> + Send + use<> {
        let (log, notes) = (Arc::clone(&self.log), Arc::clone(&self.notes));
        let publication = self.publication(step, overwrite);
        move || {
            let note = |note| notes.lock().unwrap().push((log.position(), note));
            note(Note::Saving(step, vec![seed]));
            match sealed::save(state, &publication, &options, &Progress::default()) {
                Ok(_) => note(Note::Saved(step, vec![seed])),
                // The caller relies on this answer, so the checkpoint must be durable.
                Err(Error::Exists { .. }) => note(Note::There(step)),
                Err(error) => return Err(error),
            }
            Ok(())
        }
    }

    /// Flips a bit of a step's data, durably.
    pub(crate) fn damage(&mut self, step: u64) -> Result<()> {
        let path = forge::shard_path(&self.store.step_path(step));
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        let file = File::open_to_write(&path, Direct::Off)?;
        let file_system = &self.options.file_system;
        file_system.change(Change::Write(&file, &bytes))?;
        file_system.change(Change::SyncData(&file))?;
        self.note(Note::Damaged(step));
        Ok(())
    }

    /// Reads all steps back; `expected` lists which of them are damaged.
    pub(crate) fn scrub(&mut self, expected: &[(u64, bool)]) -> Result<()> {
        for &(step, is_damaged) in expected {
            self.note(Note::Marking(step, is_damaged));
        }
        if self.mutant.is_unread() {
            for step in self.store.steps()? {
                let id = self.store.identity(step)?.unwrap();
                self.store.mark_verified(step, &id)?;
            }
        } else {
            let progress = Progress::default();
            self.store
                .scrub(&Scrub::default(), &self.options, &progress)?;
        }
        for &(step, is_damaged) in expected {
            self.note(Note::Marked(step, is_damaged));
        }
        Ok(())
    }

    /// Saves as several ranks do; the first one coordinates.
    pub(crate) fn save_ranks(&mut self, step: u64, seeds: &[u64], overwrite: bool) -> Result<()> {
        self.note(Note::Saving(step, seeds.to_vec()));
        let (publication, progress) = (self.publication(step, overwrite), Progress::default());
        let file_system = &self.options.file_system;
        let mut attempt = Attempt::begin(&publication.path, overwrite, file_system, &progress)?;
        let sealing = self.options.is_sealed.then(sealed::sealing);
        if let Some(sealing) = &sealing {
            attempt.seal(sealing.clone());
        }
        let mut parts = Vec::new();
        for (rank, &seed) in (0..).zip(seeds) {
            let state = self.sample(seed).state();
            let written = if rank == 0 {
                write_rank(&mut attempt, rank, state, &self.options, &progress)?
            } else {
                let mut joined =
                    Attempt::join(&publication.path, attempt.id(), file_system, &progress)?;
                if let Some(sealing) = &sealing {
                    joined.seal(sealing.clone());
                }
                write_rank(&mut joined, rank, state, &self.options, &progress)?
            };
            parts.push(written.part);
        }
        commit(attempt, &publication, parts)?;
        self.note(Note::Saved(step, seeds.to_vec()));
        Ok(())
    }

    pub(crate) fn delete(&mut self, step: u64) -> Result<()> {
        self.note(Note::Deleting(step));
        match self.store.delete(step) {
            // The caller relies on this answer, so the deletion must be durable.
            Ok(_) | Err(Error::NotFound { .. }) => self.note(Note::Deleted(step)),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    pub(crate) fn delete_protected(&mut self, step: u64) -> Result<()> {
        self.note(Note::Deleting(step));
        self.note(Note::Protecting(step, false));
        self.store.delete_protected(step)?;
        self.note(Note::Deleted(step));
        Ok(())
    }

    pub(crate) fn mark(&mut self, step: u64, is_damaged: bool) -> Result<()> {
        let checkpoint = Checkpoint::open(&self.store.step_path(step))?;
        let id = checkpoint.manifest().id.clone();
        self.note(Note::Marking(step, is_damaged));
        if is_damaged {
            self.store.mark_damaged(step, &id)?;
        } else {
            self.store.mark_verified(step, &id)?;
        }
        self.note(Note::Marked(step, is_damaged));
        Ok(())
    }

    pub(crate) fn protect(&mut self, step: u64, on: bool) -> Result<()> {
        self.note(Note::Protecting(step, on));
        if on {
            self.store.protect(step)?;
        } else {
            self.store.unprotect(step)?;
        }
        self.note(Note::Protected(step, on));
        Ok(())
    }

    /// Retention after a save, as in `CheckpointStore.save`.
    pub(crate) fn retain(&mut self, keep_last: u64, saved: u64) -> Result<()> {
        let plan = self
            .store
            .plan_retention(Some(keep_last), None, Some(saved))?;
        let mut doomed = Vec::new();
        for verdict in plan {
            if let Some(id) = verdict.doomed.map(|doomed| doomed.id) {
                self.note(Note::Retaining(verdict.step));
                doomed.push((verdict.step, id));
            }
        }
        for step in self.store.retire(&doomed)? {
            self.note(Note::Gone(step));
        }
        Ok(())
    }

    /// Quarantines a step, if it was found damaged.
    pub(crate) fn quarantine(&mut self, step: u64) -> Result<()> {
        let mut marks = self.store.marks()?.into_iter();
        if marks.any(|mark| mark.step == step && mark.is_damaged) {
            self.note(Note::Quarantining(step));
        }
        self.store.make_way(step, &Progress::default())?;
        // Perhaps by an earlier process: the caller relies on the quarantine, so it must be
        // durable.
        if self
            .store
            .quarantined()?
            .iter()
            .any(|quarantined| quarantined.step == step)
        {
            self.note(Note::Quarantined(step));
        }
        Ok(())
    }

    /// Saves as `CheckpointStore.save` does.
    pub(crate) fn save_over(&mut self, step: u64, seed: u64) -> Result<()> {
        self.quarantine(step)?;
        self.save(step, seed, false)
    }

    pub(crate) fn sweep(&mut self) -> Result<()> {
        self.store.sweep().map(drop)
    }
}
