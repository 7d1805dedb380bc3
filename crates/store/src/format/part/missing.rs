//! Entries of a part for state that could not be salvaged.

use serde::{Deserialize, Serialize};

/// An entry for lost state: a tensor, or the state of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Missing {
    /// Dotted name.
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// Dimensions, outermost first.
    pub shape: Vec<u64>,
    /// The reason for the loss.
    pub reason: String,
    /// The kind of loss.
    #[serde(default, skip_serializing_if = "MissingKind::is_own")]
    pub kind: MissingKind,
}

/// The kind of an entry for lost state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MissingKind {
    /// A tensor of the rank, or an alias of one; the tree refers to it by its index in the list.
    #[default]
    Own,
    /// A global tensor, under its global name; trees refer to it as to an existing one.
    Shared,
    /// The rank's state: its structure, its plain values, and tensors that nothing refers to any
    /// more.
    State,
}

impl MissingKind {
    fn is_own(&self) -> bool {
        *self == MissingKind::Own
    }
}
