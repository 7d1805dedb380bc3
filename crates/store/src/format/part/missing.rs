//! What could not be salvaged, as the part of its rank lists it.

use serde::{Deserialize, Serialize};

/// What could not be salvaged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Dotted name.
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// Why it is missing.
    pub reason: String,
    /// What it is.
    #[serde(default, skip_serializing_if = "MissingKind::is_own")]
    pub kind: MissingKind,
}

/// What a missing entry stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MissingKind {
    /// A tensor of the rank, or a further name of one; the tree refers to it by its place in the list.
    #[default]
    Own,
    /// A global tensor, under its global name, which trees refer to as if it were there.
    Shared,
    /// The rank's state: its structure and plain values, and tensors that nothing names any more.
    State,
}

impl MissingKind {
    fn is_own(&self) -> bool {
        *self == MissingKind::Own
    }
}
