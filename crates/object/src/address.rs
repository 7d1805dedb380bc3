//! URLs of objects, as paths.

use std::fmt;
use std::io;
use std::path::Path;

use object_store::path::Path as Key;

/// What a bucket is called, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// "s3".
    pub scheme: &'static str,
    /// The bucket, or container.
    pub bucket: String,
}

impl Address {
    /// Whose bucket a path names; `None` where it is none of a URL of objects.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a URL without a bucket.
    pub fn of(path: &Path) -> io::Result<Option<Address>> {
        let Some((scheme, rest)) = split(path) else {
            return Ok(None);
        };
        let bucket = rest.split('/').next().unwrap_or_default();
        if bucket.is_empty() || bucket.contains(['?', '#', '@', ':']) {
            let example = format!("{scheme}://BUCKET/DIRECTORY");
            return Err(invalid(format!("no bucket is named: a URL is {example}")));
        }
        let bucket = bucket.to_owned();
        Ok(Some(Address { scheme, bucket }))
    }

    /// The key that a path of this bucket is.
    pub(crate) fn key(&self, path: &Path) -> io::Result<Key> {
        let inside = split(path).and_then(|(scheme, rest)| {
            let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
            (scheme == self.scheme && bucket == self.bucket).then_some(key)
        });
        let Some(key) = inside else {
            return Err(invalid(format!("it is not in {self}")));
        };
        Key::parse(key.trim_end_matches('/')).map_err(|error| invalid(error.to_string()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.bucket)
    }
}

/// What a URL of a bucket begins with, before its `://`.
pub const SCHEMES: [&str; 1] = ["s3"];

fn split(path: &Path) -> Option<(&'static str, &str)> {
    let (found, rest) = path.to_str()?.split_once("://")?;
    let scheme = SCHEMES.into_iter().find(|scheme| *scheme == found)?;
    Some((scheme, rest))
}

fn invalid(detail: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_bucket_and_a_key() {
        let path = Path::new("s3://bucket/run");
        let address = Address::of(path).unwrap().unwrap();
        assert_eq!(address.to_string(), "s3://bucket");
        let key = |path: &Path| address.key(path).unwrap().to_string();
        assert_eq!(
            key(&path.join("step-1").join("manifest.json")),
            "run/step-1/manifest.json"
        );
        assert_eq!(key(Path::new("s3://bucket/run/")), "run");
        assert_eq!(key(Path::new("s3://bucket")), "");
        assert!(address.key(Path::new("s3://other/run")).is_err());
        assert!(address.key(Path::new("s3://bucket/run/../x")).is_err());
    }

    #[test]
    fn other_paths_are_none_and_a_url_without_a_bucket_is_refused() {
        for path in ["/data/run", "run", "http://host/x", "s3:/bucket/x"] {
            assert_eq!(Address::of(Path::new(path)).unwrap(), None, "{path}");
        }
        for path in [
            "s3://",
            "s3:///x",
            "s3://user@host/x",
            "s3://b?endpoint=x/y",
        ] {
            assert!(Address::of(Path::new(path)).is_err(), "{path}");
        }
    }
}
