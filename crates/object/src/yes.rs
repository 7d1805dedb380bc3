//! What an environment variable has to say for a yes.

/// As the library reads it.
pub(crate) fn says_yes(told: Option<&String>) -> bool {
    let told = told.map(|told| told.to_ascii_lowercase());
    told.is_some_and(|told| matches!(told.as_str(), "1" | "true" | "on" | "yes" | "y"))
}
