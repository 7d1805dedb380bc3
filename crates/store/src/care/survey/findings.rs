//! The findings of a survey, and queries on them.

use std::ops::Range;

use super::describe::{Described, Description};
use crate::format::manifest::Manifest;
use crate::format::part::{Part, Rank};
use crate::report::Problem;
use crate::seal::ShardOpener;

/// A checkpoint as far as it can be read.
#[derive(Debug)]
pub struct Survey {
    /// The manifest, if it is whole.
    pub manifest: Option<Manifest>,
    /// The ranks' parts, or their reconstructions, merged into one.
    pub part: Part,
    /// The worst source among all ranks.
    pub described: Described,
    /// For each entry of the part, the damage to it; `None` if it is intact or cannot be checked.
    pub hits: Vec<Option<String>>,
    /// Tensors made of boxes, except those that were missing before.
    pub shared: Vec<SharedTensor>,
    /// Names of missing files.
    pub missing_files: Vec<String>,
    /// All problems found.
    pub problems: Vec<Problem>,
    /// Bytes read and digested.
    pub bytes_checked: u64,
    /// Duration in seconds.
    pub seconds: f64,
    /// For each rank, where its own entries begin in `part`, and their source.
    pub(super) ranks: Vec<(Rank, Described)>,
    /// For each file, the number of bytes readable in whole chunks.
    pub(super) usable_bytes: Vec<u64>,
    /// The openers of all files, if the checkpoint is sealed; else none.
    pub(super) openers: Vec<ShardOpener>,
}

/// A tensor of which ranks stored boxes, or that a tree refers to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedTensor {
    /// Global name.
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Size of the whole tensor.
    pub bytes: u64,
    /// The damage to it; `None` if none is known.
    pub hit: Option<String>,
    /// Whether parts with a digest in the manifest suffice to decide `hit`.
    pub is_vouched_for: bool,
    /// The entries that it is made of, unless it is hit.
    pub(crate) entries: Vec<usize>,
    /// Whether a remaining tree refers to it.
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
            openers: description.openers,
            part,
        }
    }

    /// Number of ranks, as far as known.
    pub fn world_size(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// The source of each rank's description.
    pub fn described_by(&self) -> Vec<Described> {
        self.ranks.iter().map(|rank| rank.1).collect()
    }

    /// The rank that an entry belongs to.
    pub fn rank_of(&self, entry: usize) -> u32 {
        let starts_before = |rank: &(Rank, Described)| rank.0.first_tensor <= entry;
        self.ranks.partition_point(starts_before) as u32 - 1
    }

    /// Whether an intact entry is proven intact.
    pub fn is_vouched_for(&self, entry: usize) -> bool {
        self.ranks[self.rank_of(entry) as usize].1 == Described::Whole
    }

    /// Indices of the entries without known damage.
    pub fn intact(&self) -> Vec<usize> {
        let tensors = 0..self.hits.len();
        tensors
            .filter(|&tensor| self.hits[tensor].is_none())
            .collect()
    }

    /// Where a rank's own entries begin, and their source.
    pub(crate) fn rank(&self, rank: u32) -> &(Rank, Described) {
        &self.ranks[rank as usize]
    }

    /// The entries, aliases and missing entries of a rank, as index ranges.
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
