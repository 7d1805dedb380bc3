//! The tree of a part, as far as this crate inspects it: the kinds of its values.
//!
//! Only Python interprets trees. This crate finds out whether a step needs a newer version, without
//! loading the step.

/// The tags of format 1 (docs/format.md, 6.2 and 6.6).
const TAGS: [&str; 40] = [
    "tensor",
    "ndarray",
    "missing",
    "int",
    "float",
    "str",
    "bytes",
    "bytearray",
    "complex",
    "tuple",
    "set",
    "frozenset",
    "dict",
    "odict",
    "counter",
    "defaultdict",
    "size",
    "dtype",
    "device",
    "np.dtype",
    "np",
    "slice",
    "range",
    "first",
    "deque",
    "date",
    "time",
    "datetime",
    "timedelta",
    "timezone",
    "zone",
    "path",
    "decimal",
    "uuid",
    "object",
    "subclass",
    "sparse",
    "nested",
    "jagged",
    "sealed",
];

/// The start of a tagged object in compact JSON. Inside a string it would contain escapes.
const TAGGED: &str = "{\"$\":\"";

/// The first tag that this version does not know. A tree in another JSON style may hide one; the
/// load then finds it.
pub(crate) fn unknown_tag(tree: &str) -> Option<&str> {
    tree.split(TAGGED).skip(1).find_map(|rest| {
        let tag = rest.split_once('"').map_or(rest, |(tag, _)| tag);
        (!TAGS.contains(&tag)).then_some(tag)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tags_are_looked_at() {
        for known in [
            "{}",
            "null",
            r#"{"a":{"$":"tensor","i":0},"b":[{"$":"np","dtype":"<f4","v":""}]}"#,
            r#"{"text":"{\"$\":\"pickle\"}","key {":"$:"}"#,
        ] {
            assert_eq!(unknown_tag(known), None, "{known}");
        }
        let newer = r#"{"a":{"$":"tuple","v":[{"$":"quaternion","v":[1]}]}}"#;
        assert_eq!(unknown_tag(newer), Some("quaternion"));
        assert_eq!(unknown_tag("{\"$\":\"open"), Some("open"));
    }
}
