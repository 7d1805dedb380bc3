//! Boolean environment variables.

/// Whether a variable is true, by the client library's own rules.
pub(crate) fn says_yes(told: Option<&String>) -> bool {
    let told = told.map(|told| told.to_ascii_lowercase());
    told.is_some_and(|told| matches!(told.as_str(), "1" | "true" | "on" | "yes" | "y"))
}
