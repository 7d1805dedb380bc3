//! Merging the parts of all ranks into one.

use serde_json::value::RawValue;

use super::Part;

/// The data of a rank that stays separate when all parts are merged.
#[derive(Debug)]
pub(crate) struct Rank {
    pub(crate) tree: Box<RawValue>,
    /// Index of its first tensor in the merged part.
    pub(crate) first_tensor: usize,
    /// Index of its first alias in the merged part.
    pub(crate) first_alias: usize,
    /// Index of its first missing entry in the merged part.
    pub(crate) first_missing: usize,
}

impl Part {
    /// Merges the parts of all ranks; returns the merged part and each rank's separate data, or
    /// `None` if there are no parts.
    pub(crate) fn merge(parts: Vec<Part>) -> Option<(Part, Vec<Rank>)> {
        let nothing = || RawValue::from_string("null".to_owned()).expect("it is JSON");
        let mut ranks = Vec::with_capacity(parts.len());
        let mut merged: Option<Part> = None;
        for mut part in parts {
            let count = |count: fn(&Part) -> usize| merged.as_ref().map_or(0, count);
            let files = count(|part| part.files.len());
            let rank = Rank {
                tree: std::mem::replace(&mut part.tree, nothing()),
                first_tensor: count(|part| part.tensors.len()),
                first_alias: count(|part| part.aliases.len()),
                first_missing: count(|part| part.missing.len()),
            };
            part.tensors
                .iter_mut()
                .for_each(|entry| entry.file += files);
            let aliases = part.aliases.iter_mut();
            aliases.for_each(|alias| alias.tensor += rank.first_tensor);
            ranks.push(rank);
            match &mut merged {
                None => merged = Some(part),
                Some(merged) => {
                    merged.files.extend(part.files);
                    merged.tensors.extend(part.tensors);
                    merged.aliases.extend(part.aliases);
                    merged.missing.extend(part.missing);
                }
            }
        }
        merged.map(|part| (part, ranks))
    }
}
