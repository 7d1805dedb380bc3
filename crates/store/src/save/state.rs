//! What is to be saved.

use penstock_io::buffer::Region;
use serde_json::value::RawValue;

use super::linked::Linked;
use crate::format::part::Alias;
use crate::plan::write::TensorSpec;

/// What is to be saved.
pub struct State {
    /// The tensors in memory, by name, type and shape.
    pub tensors: Vec<TensorSpec>,
    /// Their bytes, in the same order.
    pub sources: Vec<Region>,
    /// Those in files, which are counted behind the others.
    pub linked: Linked,
    /// Further names of tensors, and views into them.
    pub aliases: Vec<Alias>,
    /// Structure and plain leaves, as typed JSON.
    pub tree: Box<RawValue>,
}
