//! How a store of objects is reached, as far as a URL does not say.

/// What a caller may say of a store of objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Remote {
    /// Where the store answers, such as `http://127.0.0.1:7070`; that of the provider if it is not given.
    pub endpoint: Option<String>,
    /// The region of the bucket.
    pub region: Option<String>,
    /// Who asks: the key's id.
    pub access_key_id: Option<String>,
    /// And its secret.
    pub secret_access_key: Option<String>,
    /// And of a key that ends soon, its token.
    pub session_token: Option<String>,
    /// Bytes of a part of an upload, a whole number of MiB.
    pub part_bytes: Option<usize>,
    /// Requests at a time.
    pub connections: Option<usize>,
}

/// Bytes of a part where nothing else is asked for: the most of one request that is repeated, and few
/// enough that many are under way.
const PART_BYTES: usize = 8 << 20;

/// S3 takes no smaller ones, but for the last.
const PART_BYTES_MIN: usize = 5 << 20;

const MIB: usize = 1 << 20;

/// Requests at a time where nothing else is asked for.
const CONNECTIONS: usize = 24;

const CONNECTIONS_MAX: usize = 256;

impl Remote {
    /// Bytes of a part: whole MiB, so that digests of chunks are digests of parts.
    pub fn part_bytes(&self) -> usize {
        let wanted = self.part_bytes.unwrap_or(PART_BYTES);
        wanted.clamp(PART_BYTES_MIN, 1 << 30).next_multiple_of(MIB)
    }

    /// Requests at a time.
    pub fn connections(&self) -> usize {
        self.connections
            .unwrap_or(CONNECTIONS)
            .clamp(1, CONNECTIONS_MAX)
    }
}
