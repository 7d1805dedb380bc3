//! Salvage of one rank: reads its tensors once more, rebuilds its tree, and lists its losses.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use penstock_io::buffer::{HostRegion, Region};
use serde_json::value::RawValue;

use crate::care::references::{Place, Renumbering, renumber};
use crate::care::survey::{Described, SharedTensor, Survey};
use crate::error::{Error, Result};
use crate::format::digest::CHUNK_BYTES;
use crate::format::name;
use crate::format::part::{Alias, Missing, MissingKind, TensorEntry};
use crate::options::Options;
use crate::pipeline::read::{OnDamage, Source, read};
use crate::pipeline::target::Target;
use crate::plan::read::{Goal, Placement, Request, plan};
use crate::plan::reshard::box_text;
use crate::plan::write::{Grouped, TensorSpec};
use crate::progress::Progress;
use crate::report::Run;
use crate::save::{Linked, SaveState};

/// A salvage in progress, rank by rank.
pub(super) struct Salvage<'a> {
    path: &'a Path,
    options: &'a Options,
    found: Survey,
    /// Whether tensors that cannot be checked are recovered as well.
    unverified: bool,
    /// For each entry whether it is recovered, as far as known.
    is_taken: Vec<bool>,
    /// Names of the recovered tensors that ranks share.
    shared: HashSet<String>,
    /// Number of recovered tensors that belong to a single rank.
    own: usize,
    /// Total size of the recovered tensors.
    pub(super) recovered_bytes: u64,
    /// Tensors that were not recovered; with several ranks, each with the rank that owned it.
    pub(super) missing: Vec<(Option<u32>, Missing)>,
}

impl<'a> Salvage<'a> {
    pub(super) fn new(
        path: &'a Path,
        found: Survey,
        unverified: bool,
        options: &'a Options,
    ) -> Salvage<'a> {
        let tensors = found.part.tensors.iter().enumerate();
        let is_own = |(entry, tensor): (usize, &TensorEntry)| {
            let is_believed = unverified || found.is_vouched_for(entry);
            tensor.region.is_none() && found.hits[entry].is_none() && is_believed
        };
        let mut is_taken: Vec<bool> = tensors.map(is_own).collect();
        let shared = found.shared.iter();
        let shared = shared.filter(|tensor| is_to_be_had(tensor, unverified));
        let names = shared.clone().map(|tensor| tensor.name.clone()).collect();
        for &entry in shared.flat_map(|tensor| &tensor.entries) {
            is_taken[entry] = true;
        }
        Salvage {
            path,
            options,
            found,
            unverified,
            is_taken,
            shared: names,
            own: 0,
            recovered_bytes: 0,
            missing: Vec::new(),
        }
    }

    /// Number of recovered tensors.
    pub(super) fn tensors(&self) -> usize {
        self.own + self.shared.len()
    }

    /// Whether part of the state is missing.
    pub(super) fn lacks_something(&self) -> bool {
        !self.missing.is_empty()
    }

    /// Whether the group had tensors and all were recovered. False if a part is lost, since that
    /// part may have listed more.
    pub(super) fn has_all_of(&self, group: &str) -> bool {
        let tensors = self.found.part.tensors.iter().zip(&self.is_taken);
        let mut of_it = tensors
            .filter(|(tensor, _)| tensor.group.as_deref() == Some(group))
            .peekable();
        self.ranks_lost().is_empty()
            && of_it.peek().is_some()
            && of_it.all(|(_, is_taken)| *is_taken)
    }

    /// The ranks whose structure and plain values are lost.
    pub(super) fn ranks_lost(&self) -> Vec<u32> {
        let ranks = 0..self.found.world_size();
        ranks.filter(|&rank| self.is_lost(rank)).collect()
    }

    /// Recovers a rank's state; returns it with the list of the rank's losses.
    pub(super) fn take(
        &mut self,
        rank: u32,
        progress: &Progress,
    ) -> Result<(SaveState, Vec<Missing>)> {
        let [entries, _, earlier] = self.found.ranges(rank);
        let mut missing = self.found.part.missing[earlier].to_vec();
        if rank == 0 {
            let known = self.found.shared.iter();
            let known = known.filter(|tensor| !is_to_be_had(tensor, self.unverified));
            missing.extend(known.map(|tensor| self.missing_shared(tensor)));
        }
        let sources = self.load(entries, &mut missing, progress)?;
        let mut state = self.assemble(rank, &mut missing)?;
        state.sources = sources;
        self.recovered_bytes += state.sources.iter().map(Region::len).sum::<u64>();
        let own = state.tensors.iter().filter(|spec| spec.region.is_none());
        self.own += own.count();
        let several = self.found.world_size() > 1;
        let whose =
            |entry: &Missing| (several && entry.kind != MissingKind::Shared).then_some(rank);
        self.missing
            .extend(missing.iter().map(|entry| (whose(entry), entry.clone())));
        Ok((state, missing))
    }

    /// Reads the tensors to recover and checks each chunk against its digest once more; a tensor
    /// that turns out damaged counts as hit from then on. In a damaged chunk, neighbouring tensors
    /// can still be intact if the digest identifies the changed byte.
    fn load(
        &mut self,
        entries: Range<usize>,
        missing: &mut Vec<Missing>,
        progress: &Progress,
    ) -> Result<Vec<Region>> {
        loop {
            // A chunk that does not open ends a read before all of it is there. Each time at least
            // one tensor is given up.
            if let Some(regions) = self.try_load(entries.clone(), missing, progress)? {
                return Ok(regions);
            }
        }
    }

    /// Reads as [`load`](Salvage::load) does; `None` if a chunk did not open.
    fn try_load(
        &mut self,
        entries: Range<usize>,
        missing: &mut Vec<Missing>,
        progress: &Progress,
    ) -> Result<Option<Vec<Region>>> {
        let taken: Vec<usize> = entries.filter(|&entry| self.is_taken[entry]).collect();
        let found = &self.found;
        let tensors = || taken.iter().map(|&entry| &found.part.tensors[entry]);
        let options = Options {
            extent_bytes: Some(CHUNK_BYTES as usize),
            ..self.options.clone()
        };
        let settings = options.choose(self.path, tensors().map(TensorEntry::nbytes).sum());
        let files: HashSet<usize> = tensors().map(|tensor| tensor.file).collect();
        let is_wanted = |file: usize| files.contains(&file);
        let opened = found.open(
            self.path,
            self.options.file_system.files(),
            settings.direct,
            true,
            is_wanted,
        )?;
        let (numbers, sources): (Vec<usize>, Vec<Source<'_>>) = opened.into_iter().unzip();
        let request = |tensor: &TensorEntry| Request {
            // The file of an empty tensor may be gone; nothing is read for it.
            file: numbers.binary_search(&tensor.file).unwrap_or_default(),
            range: tensor.range.0..tensor.range.1,
            goal: Goal::Fresh,
        };
        let requests: Vec<Request> = tensors().map(request).collect();
        let files: Vec<_> = sources.iter().map(Source::facts).collect();
        let plan = plan(&files, &requests, false, settings.extent_bytes as u64);
        let placements = plan.placements.clone();
        let none = requests.iter().map(|_| Target::Fresh).collect();
        let mut run = Run::default();
        let survey = OnDamage::Survey;
        let outcome = read(plan, none, &sources, &settings, survey, progress, &mut run)?;
        let segments: Vec<_> = outcome.segments.into_iter().map(Arc::new).collect();
        let region = |(tensor, placement): (&TensorEntry, Placement)| match placement {
            Placement::Segment { segment, offset } => {
                let start = offset as usize;
                HostRegion::within(&segments[segment], start..start + tensor.nbytes() as usize)
            }
            Placement::Empty | Placement::Target => HostRegion::from(Vec::new()),
        };
        let regions: Vec<_> = tensors()
            .zip(placements)
            .map(region)
            .map(Region::from)
            .collect();
        drop(sources);
        let is_cut_short = outcome.damage.iter().any(|damage| damage.is_tampered);
        for damage in &outcome.damage {
            self.found.hit(numbers[damage.file], damage);
        }
        for &entry in &taken {
            if let Some(reason) = self.found.hits[entry].clone() {
                self.give_up(entry, reason, missing);
            }
        }
        if is_cut_short {
            return Ok(None);
        }
        let regions = taken.iter().zip(regions);
        let kept = regions.filter(|(entry, _)| self.is_taken[**entry]);
        Ok(Some(kept.map(|(_, region)| region).collect()))
    }

    /// Stops recovering a tensor that turned out damaged. Boxes of it that are already saved
    /// remain: a tensor listed as missing counts as missing whatever boxes exist.
    fn give_up(&mut self, entry: usize, reason: String, missing: &mut Vec<Missing>) {
        self.is_taken[entry] = false;
        let Some(region) = &self.found.part.tensors[entry].region else {
            return;
        };
        if !self.shared.remove(&region.tensor) {
            return;
        }
        let mut tensors = self.found.shared.iter_mut();
        if let Some(tensor) = tensors.find(|found| found.name == region.tensor) {
            tensor.hit = Some(reason);
            let entries = std::mem::take(&mut tensor.entries);
            entries
                .into_iter()
                .for_each(|entry| self.is_taken[entry] = false);
            let tensor = tensor.clone();
            missing.push(self.missing_shared(&tensor));
        }
    }

    /// Builds the state of a rank without its bytes, and appends the rank's losses to `missing`.
    fn assemble(&self, rank: u32, missing: &mut Vec<Missing>) -> Result<SaveState> {
        let [entries, aliases, _] = self.found.ranges(rank);
        let part = &self.found.part;
        let mut to = Renumbering::default();
        let mut tensors = Vec::new();
        let mut grouped = HashSet::new();
        for entry in entries.clone() {
            let tensor = &part.tensors[entry];
            let index = entry - entries.start;
            if self.is_taken[entry] {
                to.tensors.insert(index, Place::Kept(tensors.len()));
                // Reading a part does not repeat all of the writer's checks: a tensor whose name is
                // already used in its group is saved without a group.
                let group = group_of(tensor).filter(|of| grouped.insert(of.clone()));
                tensors.push(spec(tensor, group));
            } else if tensor.region.is_none() {
                to.tensors.insert(index, Place::Missing(missing.len()));
                missing.push(self.missing_own(rank, entry));
            }
        }
        let mut kept: Vec<Alias> = Vec::new();
        for index in aliases.clone() {
            let alias = &part.aliases[index];
            let tensor = &part.tensors[alias.tensor];
            let place = match to.tensors.get(&(alias.tensor - entries.start)) {
                Some(Place::Kept(tensor)) => {
                    kept.push(Alias {
                        tensor: *tensor,
                        ..alias.clone()
                    });
                    Place::Kept(kept.len() - 1)
                }
                _ => {
                    let view = alias.view.as_ref();
                    missing.push(Missing {
                        name: alias.name.clone(),
                        dtype: tensor.dtype.clone(),
                        shape: view.map_or(&tensor.shape, |view| &view.shape).clone(),
                        reason: format!("it shares the elements of {:?}", tensor.name),
                        kind: MissingKind::Own,
                    });
                    Place::Missing(missing.len() - 1)
                }
            };
            to.aliases.insert(index - aliases.start, place);
        }
        let tree = self.tree(rank, &to, &tensors, missing)?;
        Ok(SaveState {
            tensors,
            sources: Vec::new(),
            linked: Linked::default(),
            aliases: kept,
            tree,
        })
    }

    /// The reason why a tensor of a single rank is not recovered.
    fn missing_own(&self, rank: u32, entry: usize) -> Missing {
        let tensor = &self.found.part.tensors[entry];
        let unproven = || {
            let file = name::part_file(rank, &self.found.part.id);
            format!("{file} is lost, and nothing else vouches for it")
        };
        Missing {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
            shape: tensor.shape.clone(),
            reason: self.found.hits[entry].clone().unwrap_or_else(unproven),
            kind: MissingKind::Own,
        }
    }

    /// The reason why a tensor that ranks share is not recovered.
    fn missing_shared(&self, tensor: &SharedTensor) -> Missing {
        let part = &self.found.part;
        let unproven = || {
            let mut entries = tensor.entries.iter();
            let entry = entries.find(|&&entry| !self.found.is_vouched_for(entry))?;
            let stored = &part.tensors[*entry];
            let place = box_text(stored, stored.region.as_ref()?);
            let rank = self.found.rank_of(*entry);
            let file = name::part_file(rank, &part.id);
            Some(format!(
                "{file} is lost, and nothing else vouches for its box {place} of rank {rank}"
            ))
        };
        let reason = tensor.hit.clone().or_else(unproven);
        Missing {
            name: tensor.name.clone(),
            dtype: tensor.dtype.clone(),
            shape: tensor.shape.clone(),
            reason: reason.unwrap_or_else(|| "nothing vouches for it".to_owned()),
            kind: MissingKind::Shared,
        }
    }

    /// The tree of a rank; if it is lost, a tree made from the names that are known.
    fn tree(
        &self,
        rank: u32,
        to: &Renumbering,
        tensors: &[TensorSpec],
        missing: &mut Vec<Missing>,
    ) -> Result<Box<RawValue>> {
        let (own, described) = self.found.rank(rank);
        let file = name::part_file(rank, &self.found.part.id);
        if *described != Described::Headers {
            let corrupt = |detail: String| Error::corrupt(self.path, &file, detail);
            return renumber(&own.tree, to).map_err(corrupt);
        }
        let several = self.found.world_size() > 1;
        if several {
            missing.push(Missing {
                name: format!("state of rank {rank}"),
                dtype: String::new(),
                shape: Vec::new(),
                reason: format!("{file} is lost"),
                kind: MissingKind::State,
            });
        }
        let own = tensors.iter().enumerate();
        let own = own.filter(|(_, spec)| spec.region.is_none());
        let mut pairs: Vec<_> = own
            .map(|(index, spec)| serde_json::json!([spec.name, {"$": "tensor", "i": index}]))
            .collect();
        if self.ranks_lost().first() == Some(&rank) {
            // Tensors that no remaining tree refers to are added here by name.
            let unnamed = self.found.shared.iter().filter(|tensor| !tensor.is_named);
            pairs.extend(unnamed.map(|tensor| {
                let SharedTensor {
                    name, dtype, shape, ..
                } = tensor;
                let leaf =
                    serde_json::json!({"$": "tensor", "g": name, "dtype": dtype, "shape": shape});
                serde_json::json!([name, leaf])
            }));
        }
        let tree = match pairs.is_empty() && several {
            true => serde_json::json!({"$": "missing", "i": missing.len() - 1}),
            false => serde_json::json!({"$": "dict", "v": pairs}),
        };
        Ok(RawValue::from_string(tree.to_string()).expect("it is JSON"))
    }

    /// Whether the tree of a rank is lost, now or in an earlier salvage.
    fn is_lost(&self, rank: u32) -> bool {
        let [_, _, missing] = self.found.ranges(rank);
        let mut missing = self.found.part.missing[missing].iter();
        let is_lost = self.found.rank(rank).1 == Described::Headers;
        is_lost || missing.any(|entry| entry.kind == MissingKind::State)
    }
}

/// Whether a tensor that ranks share can be recovered.
fn is_to_be_had(tensor: &SharedTensor, unverified: bool) -> bool {
    tensor.hit.is_none() && (unverified || tensor.is_vouched_for)
}

/// The group of a tensor and its name there, if it has one.
fn group_of(tensor: &TensorEntry) -> Option<Grouped> {
    tensor.group.clone().map(|group| Grouped {
        group,
        name: tensor.stored_name().to_owned(),
    })
}

fn spec(tensor: &TensorEntry, group: Option<Grouped>) -> TensorSpec {
    TensorSpec {
        name: tensor.name.clone(),
        dtype: tensor.dtype.clone(),
        shape: tensor.shape.clone(),
        item_bytes: tensor.item_bytes(),
        region: tensor.region.clone(),
        group,
    }
}
