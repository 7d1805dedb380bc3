//! Renumbers a tree's references to tensors after some of the tensors were lost.
//!
//! A tree is kept as text: only the objects that refer to a tensor are rewritten, so every number
//! and the order of members stay as the writer stored them.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use serde_json::value::RawValue;

/// Nesting limit: deeper than any tree that the format allows, and far below what overflows a
/// stack.
const LEVELS_MAX: usize = 1024;

const TOO_DEEP: &str = "the tree is nested too deeply";

/// The new place of each tensor, alias and missing entry that a tree refers to, by its old index.
#[derive(Debug, Default)]
pub(crate) struct Renumbering {
    pub(crate) tensors: HashMap<usize, Place>,
    pub(crate) aliases: HashMap<usize, Place>,
}

/// The new target of a reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The tensor or alias with this index.
    Kept(usize),
    /// The entry with this index in the part's list of missing tensors.
    Missing(usize),
}

/// Returns the tree with its references renumbered.
pub(crate) fn renumber(tree: &RawValue, to: &Renumbering) -> Result<Box<RawValue>, String> {
    let mut text = String::with_capacity(tree.get().len());
    write(tree, to, 0, &mut text)?;
    RawValue::from_string(text).map_err(|error| error.to_string())
}

/// A reference in a tree to a tensor that ranks share.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct SharedReference {
    #[serde(rename = "g")]
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
}

/// Returns a tree's references to shared tensors in order, duplicates included.
pub(crate) fn shared(tree: &RawValue) -> Result<Vec<SharedReference>, String> {
    let mut found = Vec::new();
    // Most trees of one rank refer to no shared tensor; this test saves parsing those.
    if tree.get().contains("\"g\"") {
        collect_shared(tree, 0, &mut found)?;
    }
    Ok(found)
}

fn collect_shared(
    node: &RawValue,
    level: usize,
    found: &mut Vec<SharedReference>,
) -> Result<(), String> {
    let raw = node.get();
    if level > LEVELS_MAX {
        return Err(TOO_DEEP.to_owned());
    }
    match raw.as_bytes().first() {
        Some(b'[') => {
            let items: Vec<&RawValue> =
                serde_json::from_str(raw).map_err(|error| malformed(&error))?;
            let mut items = items.into_iter();
            items.try_for_each(|item| collect_shared(item, level + 1, found))
        }
        Some(b'{') => {
            let members: Members<'_> =
                serde_json::from_str(raw).map_err(|error| malformed(&error))?;
            let has = |name: &str| members.0.iter().any(|(key, _)| key == name);
            if has("$") && has("g") {
                found.push(serde_json::from_str(raw).map_err(|error| malformed(&error))?);
                return Ok(());
            }
            let mut values = members.0.into_iter().map(|(_, value)| value);
            values.try_for_each(|value| collect_shared(value, level + 1, found))
        }
        _ => Ok(()),
    }
}

fn malformed(error: &serde_json::Error) -> String {
    format!("the tree is malformed: {error}")
}

fn write(node: &RawValue, to: &Renumbering, level: usize, text: &mut String) -> Result<(), String> {
    let raw = node.get();
    if level > LEVELS_MAX {
        return Err(TOO_DEEP.to_owned());
    }
    match raw.as_bytes().first() {
        Some(b'[') => {
            let items: Vec<&RawValue> =
                serde_json::from_str(raw).map_err(|error| malformed(&error))?;
            text.push('[');
            for (index, item) in items.into_iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                write(item, to, level + 1, text)?;
            }
            text.push(']');
        }
        Some(b'{') => {
            let members: Members<'_> =
                serde_json::from_str(raw).map_err(|error| malformed(&error))?;
            if let Some(reference) = members.reference(to)? {
                text.push_str(&reference);
                return Ok(());
            }
            text.push('{');
            for (index, (key, value)) in members.0.into_iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                text.push_str(&serde_json::Value::from(key).to_string());
                text.push(':');
                write(value, to, level + 1, text)?;
            }
            text.push('}');
        }
        _ => text.push_str(raw),
    }
    Ok(())
}

/// Members of a JSON object in order.
struct Members<'a>(Vec<(String, &'a RawValue)>);

impl Members<'_> {
    /// Returns the object's new text if the object refers to a tensor.
    fn reference(&self, to: &Renumbering) -> Result<Option<String>, String> {
        let member = |name: &str| self.0.iter().find(|(key, _)| key == name);
        let Some((_, tag)) = member("$") else {
            return Ok(None);
        };
        let (places, key) = match (member("i"), member("a")) {
            (Some((_, index)), None) => (&to.tensors, ("i", index)),
            (None, Some((_, index))) => (&to.aliases, ("a", index)),
            _ => return Ok(None),
        };
        // A reference to a tensor that was missing before keeps its index.
        if tag.get() == "\"missing\"" {
            return Ok(None);
        }
        let (member, index) = key;
        let old: usize = index.get().parse().unwrap_or(usize::MAX);
        let place = places.get(&old);
        let place = place.ok_or_else(|| format!("the tree refers to {member} {old}"))?;
        Ok(Some(match place {
            Place::Kept(new) => format!("{{\"$\":{},\"{member}\":{new}}}", tag.get()),
            Place::Missing(new) => format!("{{\"$\":\"missing\",\"i\":{new}}}"),
        }))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Members<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Vec<(String, &'de RawValue)>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(members)
            }
        }
        deserializer.deserialize_map(Reader).map(Members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn renumbered(tree: &str) -> Result<String, String> {
        let to = Renumbering {
            tensors: [
                (0, Place::Kept(0)),
                (1, Place::Missing(3)),
                (2, Place::Kept(1)),
            ]
            .into(),
            aliases: [(0, Place::Kept(7)), (1, Place::Missing(4))].into(),
        };
        let tree = RawValue::from_string(tree.to_owned()).unwrap();
        renumber(&tree, &to).map(|tree| tree.get().to_owned())
    }

    #[test]
    fn everything_but_references_stays_to_the_letter() {
        for tree in [
            "null",
            "-1.50e+300",
            "[1,2.0,\"\\u00fc\\ud834\\udd1e\",{}]",
            "{\"b\":1,\"a\":[],\"$x\":{\"i\":9}}",
            "{\"$\":\"tuple\",\"v\":[{\"$\":\"bytes\",\"v\":\"aa==\"}]}",
            "{\"$\":\"missing\",\"i\":1}",
        ] {
            assert_eq!(renumbered(tree).unwrap(), tree);
        }
    }

    #[test]
    fn references_are_renumbered_or_missing() {
        let tree = concat!(
            "{\"a\":{\"$\":\"tensor\",\"i\":2},\"b\":[{\"$\":\"ndarray\",\"i\":1}],",
            "\"c\":{\"$\":\"dict\",\"v\":[[1,{\"$\":\"tensor\",\"a\":0}]]},",
            "\"d\":{\"$\":\"bytes\",\"a\":1}}"
        );
        let expected = concat!(
            "{\"a\":{\"$\":\"tensor\",\"i\":1},\"b\":[{\"$\":\"missing\",\"i\":3}],",
            "\"c\":{\"$\":\"dict\",\"v\":[[1,{\"$\":\"tensor\",\"a\":7}]]},",
            "\"d\":{\"$\":\"missing\",\"i\":4}}"
        );
        assert_eq!(renumbered(tree).unwrap(), expected);
    }

    #[test]
    fn tensors_that_ranks_share_are_found_wherever_they_are() {
        let leaf = |name: &str| {
            format!("{{\"$\":\"tensor\",\"g\":\"{name}\",\"dtype\":\"int8\",\"shape\":[2,3]}}")
        };
        let text = format!(
            "{{\"a\":{},\"g\":[1,{{\"$\":\"dict\",\"v\":[[7,{}]]}}],\"i\":{{\"$\":\"tensor\",\"i\":0}}}}",
            leaf("w"),
            leaf("x.y")
        );
        let found = shared(&RawValue::from_string(text).unwrap()).unwrap();
        let names: Vec<_> = found.iter().map(|found| found.name.as_str()).collect();
        assert_eq!(names, ["w", "x.y"]);
        assert_eq!(
            (found[0].dtype.as_str(), &found[1].shape[..]),
            ("int8", &[2, 3][..])
        );
        for text in [
            "{\"$\":\"tensor\",\"g\":7}",
            &format!("{}\"g\"{}", "[".repeat(2000), "]".repeat(2000)),
        ] {
            shared(&RawValue::from_string(text.to_owned()).unwrap()).unwrap_err();
        }
    }

    #[test]
    fn what_refers_to_nothing_and_what_has_no_end_is_refused() {
        renumbered("{\"$\":\"tensor\",\"i\":9}").unwrap_err();
        renumbered("{\"$\":\"tensor\",\"i\":\"x\"}").unwrap_err();
        let deep = format!("{}{}", "[".repeat(2000), "]".repeat(2000));
        renumbered(&deep).unwrap_err();
    }
}
