//! The state to be saved.

use penstock_io::buffer::Region;
use serde_json::value::RawValue;

use super::linked::Linked;
use crate::format::part::Alias;
use crate::plan::write::TensorSpec;

/// The state to be saved.
pub struct SaveState {
    /// The tensors in memory: names, types and shapes.
    pub tensors: Vec<TensorSpec>,
    /// The bytes of `tensors`, in the same order.
    pub sources: Vec<Region>,
    /// Tensors in existing files, numbered after the others.
    pub linked: Linked,
    /// Other names of tensors, and views into them.
    pub aliases: Vec<Alias>,
    /// Structure and plain leaves, as typed JSON.
    pub tree: Box<RawValue>,
}
