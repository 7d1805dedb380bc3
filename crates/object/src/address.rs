//! URLs of objects, as paths.

use std::fmt;
use std::io;
use std::path::Path;

use object_store::path::Path as Key;

use crate::provider::Provider;

/// Provider and name of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Address {
    /// The provider, which the URL's scheme names.
    pub provider: Provider,
    /// The bucket, or container.
    pub bucket: String,
}

impl Address {
    /// The bucket that a path names; `None` for a path that is no object URL.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a URL without a bucket.
    pub fn of(path: &Path) -> io::Result<Option<Address>> {
        let Some((provider, rest)) = split(path) else {
            return Ok(None);
        };
        let bucket = rest.split('/').next().unwrap_or_default();
        if bucket.is_empty() || bucket.contains(['?', '#', '@', ':']) {
            let scheme = provider.scheme();
            let what = format!("no bucket is named: a URL is {scheme}://BUCKET/DIRECTORY");
            return Err(invalid(what));
        }
        let bucket = bucket.to_owned();
        Ok(Some(Address { provider, bucket }))
    }

    /// The key of a path in this bucket.
    pub(crate) fn key(&self, path: &Path) -> io::Result<Key> {
        let inside = split(path).and_then(|(provider, rest)| {
            let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
            (provider == self.provider && bucket == self.bucket).then_some(key)
        });
        let Some(key) = inside else {
            return Err(invalid(format!("it is not in {self}")));
        };
        if self.provider == Provider::Azure && key.contains('\\') {
            let what = "Azure takes a backslash for a slash: call it otherwise";
            return Err(invalid(what.to_owned()));
        }
        Key::parse(key.trim_end_matches('/')).map_err(|error| invalid(error.to_string()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.provider.scheme(), self.bucket)
    }
}

fn split(path: &Path) -> Option<(Provider, &str)> {
    let (scheme, rest) = path.to_str()?.split_once("://")?;
    Some((Provider::of(scheme)?, rest))
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
        assert!(address.key(Path::new("gs://bucket/run")).is_err());
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
