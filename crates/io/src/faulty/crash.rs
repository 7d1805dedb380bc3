//! Crash states: the states that a power cut could leave after a logged sequence of operations.
//!
//! The model is weaker than any file system in use. Synced data is there. Of everything else, any
//! part may be: each change of a directory's entries by itself, each length a file had or would
//! have had, and each sector of each write, torn from the others and independent of the length. A
//! sync covers the operations that ended before it began, in one file or one directory, and nothing
//! else: syncing a file does not sync its name. Two assumptions remain: a rename within a directory
//! happens or does not, and a sector that was allocated and not written reads as zeros.

mod image;
mod variants;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use super::log::{Entries, Log, Logged, Node, ROOT, Record};
use super::mix;
pub use image::{Entry, Image};
pub use variants::SECTOR_BYTES;
use variants::Variants;

/// Up to this many unsynced directory changes, all subsets are visited; beyond, a sample.
const EXHAUSTIVE_CHANGES_MAX: usize = 12;
/// How many states of one moment were visited, and whether these were all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// States visited.
    pub visited: u64,
    /// Whether there are no others.
    pub is_exhaustive: bool,
}

/// Calls `visit` with the states that a cut at `position` could leave: every state if there are at
/// most `states_max`, else a sample of that size drawn from `seed`. Stops when `visit` breaks.
pub fn states(
    log: &Log,
    position: usize,
    states_max: u64,
    seed: u64,
    visit: &mut dyn FnMut(&Image) -> ControlFlow<()>,
) -> Coverage {
    let records = log.records();
    let cut = Cut {
        records: &records,
        position,
    };
    let moment = Moment::new(&cut);
    let mut coverage = Coverage {
        visited: 0,
        is_exhaustive: true,
    };
    let mut random = seed ^ position as u64;
    let subsets = moment.subsets(states_max, &mut random);
    coverage.is_exhaustive &= subsets.is_exhaustive;
    let share = (states_max / subsets.chosen.len() as u64).max(1);
    for subset in &subsets.chosen {
        let (skeleton, files) = moment.tree(subset);
        let total = files
            .iter()
            .map(|(_, file)| moment.variants[file].count())
            .fold(1_u64, u64::saturating_mul);
        let is_whole = total <= share;
        coverage.is_exhaustive &= is_whole;
        for turn in 0..total.min(share) {
            let image = moment.image(
                &skeleton,
                &files,
                |variants, rest| {
                    if is_whole {
                        let number = *rest % variants.count();
                        *rest /= variants.count();
                        number
                    } else {
                        mix(&mut random) % variants.count()
                    }
                },
                turn,
            );
            coverage.visited += 1;
            if visit(&image).is_break() {
                return coverage;
            }
        }
    }
    coverage
}

/// A moment in a log.
struct Cut<'a> {
    records: &'a [Record],
    position: usize,
}

impl Cut<'_> {
    /// The operations that had begun by then and match `concerns`, in order, each with whether it
    /// is durable: whether a sync that had ended by then began after it ended.
    fn effects<'a>(
        &'a self,
        concerns: impl Fn(&Logged) -> bool + 'a,
        is_sync: impl Fn(&Logged) -> bool,
    ) -> impl Iterator<Item = (&'a Logged, bool)> + 'a {
        let ended_by = |record: &Record| record.ended.filter(|&ended| ended < self.position);
        let synced = self
            .records
            .iter()
            .filter(|record| is_sync(&record.op) && ended_by(record).is_some())
            .map(|record| record.begun)
            .max();
        self.records
            .iter()
            .filter(move |record| record.begun < self.position && concerns(&record.op))
            .map(move |record| {
                let is_durable = ended_by(record).is_some_and(|ended| synced > Some(ended));
                (&record.op, is_durable)
            })
    }
}

/// The possible states of one moment, by directory and file.
struct Moment<'a> {
    /// Changes of each directory: number among the unsynced ones, or `None` if durable.
    directories: Vec<Vec<(&'a Logged, Option<usize>)>>,
    unsynced: usize,
    /// The possible contents of each file.
    variants: BTreeMap<usize, Variants>,
}

/// Subsets of the unsynced directory changes.
struct Subsets {
    chosen: Vec<Vec<bool>>,
    is_exhaustive: bool,
}

impl<'a> Moment<'a> {
    fn new(cut: &'a Cut<'a>) -> Moment<'a> {
        let mut numbers = (BTreeSet::from([ROOT]), BTreeSet::new());
        for record in cut.records {
            match record.op {
                Logged::CreateDirectory { made, .. } => numbers.0.insert(made),
                Logged::Create { made, .. } => numbers.1.insert(made),
                _ => false,
            };
        }
        let mut unsynced = 0;
        let directories_max = numbers.0.last().copied().unwrap_or(ROOT);
        let changes = |directory: usize| {
            let effects = cut.effects(
                move |op| op.parent() == Some(directory),
                |op| *op == Logged::SyncDirectory(directory),
            );
            let numbered = effects.map(|(op, is_durable)| {
                let number = (!is_durable).then_some(unsynced);
                unsynced += usize::from(!is_durable);
                (op, number)
            });
            numbered.collect()
        };
        let directories = (0..=directories_max).map(changes).collect();
        let variants = numbers.1.into_iter().map(|file| {
            let effects = cut.effects(
                move |op| op.file() == Some(file),
                |op| *op == Logged::SyncData(file),
            );
            (file, Variants::new(effects))
        });
        Moment {
            directories,
            unsynced,
            variants: variants.collect(),
        }
    }

    fn subsets(&self, states_max: u64, random: &mut u64) -> Subsets {
        let unsynced = self.unsynced;
        if unsynced <= EXHAUSTIVE_CHANGES_MAX && 1 << unsynced <= states_max {
            let subset = |bits: usize| (0..unsynced).map(|bit| bits >> bit & 1 == 1).collect();
            return Subsets {
                chosen: (0..1 << unsynced).map(subset).collect(),
                is_exhaustive: true,
            };
        }
        // All, none, each prefix, and a random sample.
        let mut chosen: Vec<Vec<bool>> = (0..=unsynced)
            .map(|kept| (0..unsynced).map(|number| number < kept).collect())
            .collect();
        while (chosen.len() as u64) < (states_max / 4).max(8) {
            chosen.push(
                (0..unsynced)
                    .map(|_| mix(random).is_multiple_of(2))
                    .collect(),
            );
        }
        Subsets {
            chosen,
            is_exhaustive: false,
        }
    }

    /// The tree that a subset of the unsynced directory changes leaves: an image without its files,
    /// and the files.
    fn tree(&self, subset: &[bool]) -> (Image, Vec<(PathBuf, usize)>) {
        let (mut image, mut files) = (Image::default(), Vec::new());
        let mut open = vec![(PathBuf::new(), ROOT)];
        while let Some((path, number)) = open.pop() {
            let mut entries = Entries::new();
            for (op, unsynced) in &self.directories[number] {
                if unsynced.is_none_or(|number| subset[number]) {
                    op.apply(&mut entries);
                }
            }
            for (name, node) in entries {
                let path = path.join(name);
                match node {
                    Node::File(file) => files.push((path, file)),
                    Node::Directory(directory) => {
                        image.entries.insert(path.clone(), Entry::Directory);
                        open.push((path, directory));
                    }
                }
            }
        }
        (image, files)
    }

    /// The image in which `choose` picks the content of each file. A file with two names has the
    /// same content under both.
    fn image(
        &self,
        skeleton: &Image,
        files: &[(PathBuf, usize)],
        mut choose: impl FnMut(&Variants, &mut u64) -> u64,
        turn: u64,
    ) -> Image {
        let mut image = skeleton.clone();
        let mut rest = turn;
        let mut chosen: BTreeMap<usize, Arc<[u8]>> = BTreeMap::new();
        for (path, file) in files {
            let variants = &self.variants[file];
            let number = choose(variants, &mut rest);
            let bytes = chosen
                .entry(*file)
                .or_insert_with(|| variants.bytes(number));
            let entry = Entry::File(Arc::clone(bytes));
            image.entries.insert(path.clone(), entry);
        }
        image
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::faulty::{Faults, FaultyFileSystem};
    use crate::file::{Direct, File};
    use crate::file_system::{Change, FileSystem, Native};

    /// Files made through a log, to test the states that a cut at the end could leave.
    struct Recorded {
        directory: tempfile::TempDir,
        log: Arc<Log>,
        file_system: FaultyFileSystem,
    }

    impl Recorded {
        fn new() -> Recorded {
            let directory = tempfile::tempdir().unwrap();
            let log = Arc::new(Log::new(directory.path()));
            let faults = Arc::new(Faults::new(0).record(Arc::clone(&log)));
            Recorded {
                file_system: FaultyFileSystem::new(Arc::new(Native), faults),
                directory,
                log,
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        fn change(&self, change: Change<'_>) {
            self.file_system.change(change).unwrap();
        }

        fn create(&self, name: &str, bytes: &[u8]) -> File {
            let file = self.file_system.create(&self.path(name), Direct::Off);
            let file = file.unwrap();
            self.change(Change::Write(&file, bytes));
            file
        }

        fn sync(&self) {
            self.change(Change::SyncDirectory(self.directory.path()));
        }

        /// The names and contents that are possible now.
        fn possible(&self) -> BTreeSet<Vec<(OsString, Vec<u8>)>> {
            let mut possible = BTreeSet::new();
            let mut visit = |image: &Image| {
                let file = |(path, entry): (&PathBuf, &Entry)| match entry {
                    Entry::File(bytes) => (path.clone().into(), bytes.to_vec()),
                    Entry::Directory => (path.clone().into(), b"directory".to_vec()),
                };
                possible.insert(image.entries.iter().map(file).collect());
                ControlFlow::Continue(())
            };
            let now = self.log.position();
            let coverage = states(&self.log, now, 1 << 16, 0, &mut visit);
            assert!(coverage.is_exhaustive);
            possible
        }
    }

    fn holding(files: &[(&str, &[u8])]) -> Vec<(OsString, Vec<u8>)> {
        let file = |(name, bytes): &(&str, &[u8])| (OsString::from(name), bytes.to_vec());
        files.iter().map(file).collect()
    }

    #[test]
    fn a_name_and_the_bytes_are_synced_apart() {
        let world = Recorded::new();
        let file = world.create("a", b"x");
        let (none, cut) = (holding(&[]), holding(&[("a", b"")]));
        let (zero, whole) = (holding(&[("a", b"\0")]), holding(&[("a", b"x")]));
        let all = [&none, &cut, &zero, &whole].map(Clone::clone);
        assert_eq!(world.possible(), BTreeSet::from(all));
        world.change(Change::SyncData(&file));
        assert_eq!(world.possible(), BTreeSet::from([none, whole.clone()]));
        world.sync();
        assert_eq!(world.possible(), BTreeSet::from([whole]));
    }

    #[test]
    fn sectors_are_torn_apart() {
        let world = Recorded::new();
        let file = world.create("a", &[1; 3 * SECTOR_BYTES]);
        world.change(Change::SyncData(&file));
        world.sync();
        world.change(Change::Write(&file, &[2; 3 * SECTOR_BYTES]));
        assert_eq!(world.possible().len(), 8);
        world.change(Change::SyncData(&file));
        assert_eq!(world.possible().len(), 1);
    }

    #[test]
    fn a_rename_happens_whole_and_before_or_after_others() {
        let world = Recorded::new();
        for name in ["new", "old"] {
            let file = world.create(name, name.as_bytes());
            world.change(Change::SyncData(&file));
        }
        world.sync();
        let (from, to) = (world.path("new"), world.path("old"));
        world.change(Change::Rename {
            from: &from,
            to: &to,
        });
        let before = holding(&[("new", b"new"), ("old", b"old")]);
        let after = holding(&[("old", b"new")]);
        let both = BTreeSet::from([before, after.clone()]);
        assert_eq!(world.possible(), both);
        world.sync();
        assert_eq!(world.possible(), BTreeSet::from([after]));
    }

    #[test]
    fn a_directory_that_is_lost_takes_what_is_in_it_along() {
        let world = Recorded::new();
        let inner = world.path("inner");
        world.change(Change::CreateDirectory(&inner));
        let file = world.create("inner/a", b"x");
        world.change(Change::SyncData(&file));
        world.change(Change::SyncDirectory(&inner));
        let there = holding(&[("inner", b"directory"), ("inner/a", b"x")]);
        let both = BTreeSet::from([holding(&[]), there.clone()]);
        assert_eq!(world.possible(), both);
        world.sync();
        assert_eq!(world.possible(), BTreeSet::from([there.clone()]));
        world.change(Change::RemoveFile(&inner.join("a")));
        world.change(Change::RemoveDirectory(&inner));
        let empty = holding(&[("inner", b"directory")]);
        let any = BTreeSet::from([there, empty, holding(&[])]);
        assert_eq!(world.possible(), any);
    }

    #[test]
    fn a_sync_covers_what_ended_before_it_began() {
        let directory = tempfile::tempdir().unwrap();
        let log = Log::new(directory.path());
        let path = directory.path().join("a");
        let created = log.begin_create(&path);
        log.end(created, true);
        let named = log.begin_change(Change::SyncDirectory(directory.path()));
        log.end(named, true);
        let write = log.begin_write(&path, 0, b"x");
        let sync = log.begin_on(&path, Logged::SyncData);
        log.end_transfer(write.unwrap(), 1);
        log.end(sync, true);
        let mut contents = BTreeSet::new();
        let _ = states(&log, log.position(), 1 << 10, 0, &mut |image| {
            contents.insert(image.clone().entries.into_values().next());
            ControlFlow::Continue(())
        });
        assert_eq!(contents.len(), 3, "the write is not covered");
    }

    #[test]
    fn a_state_can_be_laid_out_over_another() {
        let world = Recorded::new();
        world.change(Change::CreateDirectory(&world.path("inner")));
        let _file = world.create("inner/a", &[7; 1000]);
        let target = tempfile::tempdir().unwrap();
        let mut before = Image::default();
        let mut count = 0;
        let _ = states(&world.log, world.log.position(), 1 << 10, 0, &mut |image| {
            image.materialise(target.path(), &before).unwrap();
            before = image.clone();
            for (path, entry) in &image.entries {
                let path = target.path().join(path);
                match entry {
                    Entry::Directory => assert!(path.is_dir()),
                    Entry::File(bytes) => assert_eq!(std::fs::read(path).unwrap(), bytes[..]),
                }
            }
            count += 1;
            ControlFlow::Continue(())
        });
        assert!(count > 8, "{count}");
    }
}
