//! The index of a group: a file that maps its tensors to shards, in the form that model loaders
//! read.

use std::collections::BTreeMap;

use serde::Serialize;

use super::part::{Part, TensorEntry};

/// File name under which model loaders look for the index.
pub const INDEX: &str = "model.safetensors.index.json";

#[derive(Serialize)]
struct Index<'a> {
    metadata: Metadata,
    weight_map: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct Metadata {
    total_size: u64,
}

/// Builds the index of a group over the parts of all ranks; the inner error says why model loaders
/// could not use one.
pub(crate) fn index(parts: &[Part], group: &str) -> Result<Result<Vec<u8>, String>, String> {
    let mut weight_map = BTreeMap::new();
    let mut total_size = 0;
    for part in parts {
        let is_of_it = |tensor: &&TensorEntry| tensor.group.as_deref() == Some(group);
        for tensor in part.tensors.iter().filter(is_of_it) {
            if !is_whole(tensor) {
                let name = tensor.stored_name();
                return Ok(Err(format!("{name} lies there in pieces of several ranks")));
            }
            if !tensor.is_under_its_own_name() {
                return Ok(Err(misread(tensor)));
            }
            let (name, file) = (tensor.stored_name(), &part.files[tensor.file].name);
            if weight_map.insert(name, file.as_str()).is_some() {
                return Ok(Err(format!(
                    "ranks have tensors of their own called {name}"
                )));
            }
            total_size += tensor.nbytes();
        }
    }
    if weight_map.is_empty() {
        return Err(format!("the group {group:?} has no tensors"));
    }
    let metadata = Metadata { total_size };
    let index = Index {
        metadata,
        weight_map,
    };
    let mut text = serde_json::to_vec_pretty(&index).expect("an index always serialises");
    text.push(b'\n');
    Ok(Ok(text))
}

/// Says why model loaders would misread a tensor.
fn misread(tensor: &TensorEntry) -> String {
    format!(
        "{} has elements of type {}, which safetensors has no name for: other readers would take \
         them for {}",
        tensor.stored_name(),
        tensor.dtype,
        tensor.stored_dtype().unwrap_or_default()
    )
}

fn is_whole(tensor: &TensorEntry) -> bool {
    let region = tensor.region.as_ref();
    region.is_none_or(|region| region.shape == tensor.shape)
}
