//! By what a client is known: the secret of its key, or a token.

use http::header::AUTHORIZATION;
use http::request::Parts;

/// The secret of every key: whoever knows it is whom they say.
pub const SECRET: &str = "secret";

/// The nth token of a client: a server takes any of them, until it has
/// [expired](crate::Bucket::expire) for a bucket.
pub fn token(client: &str, nth: usize) -> String {
    format!("{SECRET}.{nth}.{client}")
}

/// What a request has.
pub(crate) fn token_of(parts: &Parts) -> Option<&str> {
    let header = parts.headers.get(AUTHORIZATION)?.to_str().ok()?;
    header.strip_prefix("Bearer ")
}

/// The client that a request's token is of.
pub(crate) fn client_of(parts: &Parts) -> Option<String> {
    let known = token_of(parts)?.strip_prefix(SECRET)?.strip_prefix('.')?;
    known.split_once('.').map(|(_, client)| client.to_owned())
}
