//! Boolean environment variables.

/// Whether a variable is true, by the client library's own rules.
pub(crate) fn env_bool(value: Option<&String>) -> bool {
    let value = value.map(|value| value.to_ascii_lowercase());
    value.is_some_and(|value| matches!(value.as_str(), "1" | "true" | "on" | "yes" | "y"))
}
