//! What a survey found, and what can be asked of that.

use std::ops::Range;

use super::describe::{Described, Description};
use crate::format::manifest::Manifest;
use crate::format::part::{Part, Rank};
use crate::report::Problem;

/// A checkpoint as far as it can be read.
#[derive(Debug)]
pub struct Survey {
    /// The manifest, where it is whole.
    pub manifest: Option<Manifest>,
    /// What the ranks recorded, or what could be made out, all in one.
    pub part: Part,
    /// Where that comes from, of the rank of which least is left.
    pub described: Described,
    /// For each entry of the part what is wrong with it; `None` for one that is intact, or that
    /// cannot be checked.
    pub hits: Vec<Option<String>>,
    /// The tensors that are made of boxes, without those that were missing before.
    pub shared: Vec<SharedTensor>,
    /// Files that are not there.
    pub missing_files: Vec<String>,
    /// Everything that was found.
    pub problems: Vec<Problem>,
    /// Bytes that were read and digested.
    pub bytes_checked: u64,
    /// Time it took.
    pub seconds: f64,
    /// What is each rank's own, and where that comes from.
    pub(super) ranks: Vec<(Rank, Described)>,
    /// How much of each file is there in whole chunks.
    pub(super) usable_bytes: Vec<u64>,
}

/// A tensor of which ranks stored boxes, or that a tree names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedTensor {
    /// Its global name.
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Bytes of all of it.
    pub bytes: u64,
    /// What is wrong with it; `None` where nothing is known to be.
    pub hit: Option<String>,
    /// Whether parts that the manifest vouches for are enough to know that.
    pub is_vouched_for: bool,
    /// The entries that it is made of, unless it is hit.
    pub(crate) entries: Vec<usize>,
    /// Whether a tree that is left names it.
    pub(crate) is_named: bool,
}

impl Survey {
    pub(super) fn of(description: Description) -> Survey {
        let described: Vec<Described> = description.parts.iter().map(|part| part.1).collect();
        let parts = description.parts.into_iter().map(|part| part.0).collect();
        let (part, ranks) = Part::merge(parts).expect("there is a rank");
        Survey {
            manifest: description.manifest,
            described: described.iter().copied().max().expect("there is a rank"),
            hits: vec![None; part.tensors.len()],
            shared: Vec::new(),
            missing_files: description.missing_files,
            problems: description.problems,
            bytes_checked: description.bytes_checked,
            seconds: 0.0,
            ranks: ranks.into_iter().zip(described).collect(),
            usable_bytes: Vec::new(),
            part,
        }
    }

    /// How many ranks there were, as far as anything tells.
    pub fn world_size(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// Where what is known of each rank comes from.
    pub fn described_by(&self) -> Vec<Described> {
        self.ranks.iter().map(|rank| rank.1).collect()
    }

    /// The rank that an entry belongs to.
    pub fn rank_of(&self, entry: usize) -> u32 {
        let starts_before = |rank: &(Rank, Described)| rank.0.first_tensor <= entry;
        self.ranks.partition_point(starts_before) as u32 - 1
    }

    /// Whether an intact entry is proven to be.
    pub fn is_vouched_for(&self, entry: usize) -> bool {
        self.ranks[self.rank_of(entry) as usize].1 == Described::Whole
    }

    /// Indices of the entries that nothing is known to be wrong with.
    pub fn intact(&self) -> Vec<usize> {
        let tensors = 0..self.hits.len();
        tensors
            .filter(|&tensor| self.hits[tensor].is_none())
            .collect()
    }

    /// A rank's own, and where it comes from.
    pub(crate) fn rank(&self, rank: u32) -> &(Rank, Described) {
        &self.ranks[rank as usize]
    }

    /// The entries, aliases and missing entries of a rank.
    pub(crate) fn ranges(&self, rank: u32) -> [Range<usize>; 3] {
        let (first, part) = (&self.ranks[rank as usize].0, &self.part);
        let next = self.ranks.get(rank as usize + 1).map(|next| &next.0);
        let end = |of: fn(&Rank) -> usize, all: usize| next.map_or(all, of);
        [
            first.first_tensor..end(|rank| rank.first_tensor, part.tensors.len()),
            first.first_alias..end(|rank| rank.first_alias, part.aliases.len()),
            first.first_missing..end(|rank| rank.first_missing, part.missing.len()),
        ]
    }
}
