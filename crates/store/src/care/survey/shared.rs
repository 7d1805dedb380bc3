//! Tensors that ranks share: intact if intact boxes cover the whole tensor.

use std::collections::{HashMap, HashSet};

use super::describe::Described;
use super::findings::{SharedTensor, Survey};
use crate::care::references;
use crate::format::dtype;
use crate::format::name;
use crate::format::part::{MissingKind, TensorEntry};
use crate::plan::reshard::{GlobalTensors, box_text};

/// A shared tensor before its boxes are examined.
struct Candidate {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    /// Whether a tree refers to it, and whether a tree with a recorded digest does.
    is_named: bool,
    is_proven: bool,
    entries: Vec<usize>,
}

/// Decides for each shared tensor whether it is intact.
pub(super) fn assess(survey: &Survey) -> Vec<SharedTensor> {
    let candidates = candidates(survey);
    let fates = candidates.into_iter().map(|found| fate(survey, found));
    fates.collect()
}

/// Lists all shared tensors: first those that trees refer to, in order, then those known only by
/// boxes. Ranks with a digest in the manifest come first, so that no unproven source can contradict
/// them.
fn candidates(survey: &Survey) -> Vec<Candidate> {
    let missing = survey.part.missing.iter();
    let missing = missing.filter(|entry| entry.kind == MissingKind::Shared);
    let missing: HashSet<&str> = missing.map(|entry| entry.name.as_str()).collect();
    let mut found: Vec<Candidate> = Vec::new();
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut meet = |name: &str, dtype: &str, shape: &[u64]| {
        if missing.contains(name) {
            return None;
        }
        let place = *places.entry(name.to_owned()).or_insert(found.len());
        if place == found.len() {
            found.push(Candidate {
                name: name.to_owned(),
                dtype: dtype.to_owned(),
                shape: shape.to_vec(),
                is_named: false,
                is_proven: false,
                entries: Vec::new(),
            });
        }
        Some(place)
    };
    let (mut references, mut boxes) = (Vec::new(), Vec::new());
    for is_whole in [true, false] {
        for (rank, described) in &survey.ranks {
            if (*described == Described::Whole) == is_whole {
                // An invalid tree is reported elsewhere.
                for named in references::shared(&rank.tree).unwrap_or_default() {
                    let place = meet(&named.name, &named.dtype, &named.shape);
                    references.extend(place.map(|place| (place, is_whole)));
                }
            }
        }
        for (index, entry) in survey.part.tensors.iter().enumerate() {
            if let Some(region) = &entry.region
                && survey.is_vouched_for(index) == is_whole
            {
                let place = meet(&region.tensor, &entry.dtype, &region.shape);
                boxes.extend(place.map(|place| (place, index)));
            }
        }
    }
    for (place, is_whole) in references {
        found[place].is_named = true;
        found[place].is_proven |= is_whole;
    }
    for (place, index) in boxes {
        found[place].entries.push(index);
    }
    found
}

/// Tries the boxes with recorded digests first, then all boxes, to cover the whole tensor.
fn fate(survey: &Survey, found: Candidate) -> SharedTensor {
    let (vouched, others): (Vec<usize>, Vec<usize>) = found
        .entries
        .iter()
        .partition(|&&entry| survey.is_vouched_for(entry));
    let is_empty = found.shape.contains(&0);
    let mut wrong = wrong_with(survey, &found, &vouched);
    let (mut entries, mut is_vouched_for) = (vouched, true);
    if !others.is_empty() && wrong.is_some() {
        entries.extend(others);
        wrong = wrong_with(survey, &found, &entries);
        is_vouched_for = false;
    } else if entries.is_empty() {
        is_vouched_for = found.is_proven;
    }
    let item_bytes = match entries.first() {
        Some(&entry) => survey.part.tensors[entry].item_bytes(),
        None => dtype::item_bytes(&found.dtype).unwrap_or_default(),
    };
    let hit = wrong.filter(|_| !is_empty);
    SharedTensor {
        bytes: dtype::nbytes(&found.shape, item_bytes).unwrap_or_default(),
        name: found.name,
        dtype: found.dtype,
        shape: found.shape,
        entries: if hit.is_some() { Vec::new() } else { entries },
        hit,
        is_vouched_for,
        is_named: found.is_named,
    }
}

/// The reason why these boxes do not cover the whole tensor, if they do not.
fn wrong_with(survey: &Survey, found: &Candidate, entries: &[usize]) -> Option<String> {
    let tensors = &survey.part.tensors;
    let hits = entries
        .iter()
        .filter(|&&entry| survey.hits[entry].is_some());
    let hits: Vec<usize> = hits.copied().collect();
    if let Some(&first) = hits.first() {
        let reason = survey.hits[first].as_deref().unwrap_or_default();
        let region = tensors[first].region.as_ref();
        let place = region.map_or(String::new(), |region| box_text(&tensors[first], region));
        let rank = survey.rank_of(first);
        return Some(match entries.len() {
            1 => reason.to_owned(),
            all => format!(
                "{} of {all} boxes, first {place} of rank {rank}: {reason}",
                hits.len()
            ),
        });
    }
    let boxes: Vec<TensorEntry> = entries
        .iter()
        .map(|&entry| tensors[entry].clone())
        .collect();
    let global_tensors = match GlobalTensors::new(&boxes) {
        Ok(global_tensors) => global_tensors,
        Err(conflict) => {
            let rank = survey.rank_of(entries[conflict.second]);
            return Some(format!("{} (of rank {rank})", conflict.detail));
        }
    };
    let hole = match global_tensors.get(&found.name) {
        Some(tensor) if tensor.dtype != found.dtype || tensor.shape != found.shape => {
            let (dtype, shape) = (&tensor.dtype, &tensor.shape);
            return Some(format!("its boxes are of a tensor of {dtype} {shape:?}"));
        }
        Some(tensor) => tensor.uncovered()?,
        None => "all of it".to_owned(),
    };
    let ranks = (0..).zip(&survey.ranks);
    let lost = ranks.filter(|(_, rank)| rank.1 == Described::Headers);
    let lost: Vec<u32> = lost.map(|(rank, _)| rank).collect();
    Some(match lost[..] {
        [] => format!("no part holds {hole}"),
        [rank] => {
            let file = name::part_file(rank, &survey.part.id);
            format!("no part that is left holds {hole}, and {file} of rank {rank} is lost")
        }
        [first, .., last] => format!(
            "no part that is left holds {hole}, and those of {} ranks from {first} to {last} are lost",
            lost.len()
        ),
    })
}
