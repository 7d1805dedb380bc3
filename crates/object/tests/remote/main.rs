//! Objects of each provider, through its protocol.

mod azure;
#[path = "../common/mod.rs"]
mod common;
mod google;
mod nonsense;
mod repeats;
mod request_errors;
mod uploads;
