//! Identification of clients: by the secret of a key, or by a token.

use http::header::AUTHORIZATION;
use http::request::Parts;

/// The secret of every key: a client that has it is trusted to be who it claims to be.
pub const SECRET: &str = "secret";

/// The nth token of a client: a server accepts each of them, until it has
/// [expired](crate::Bucket::expire) for a bucket.
pub fn token(client: &str, nth: usize) -> String {
    format!("{SECRET}.{nth}.{client}")
}

/// The token of a request.
pub(crate) fn token_of(parts: &Parts) -> Option<&str> {
    let header = parts.headers.get(AUTHORIZATION)?.to_str().ok()?;
    header.strip_prefix("Bearer ")
}

/// The client of a request's token.
pub(crate) fn client_of(parts: &Parts) -> Option<String> {
    let known = token_of(parts)?.strip_prefix(SECRET)?.strip_prefix('.')?;
    known.split_once('.').map(|(_, client)| client.to_owned())
}
