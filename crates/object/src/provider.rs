//! The protocol of a store, and the words and headers that differ between protocols.

use http::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, IF_MATCH, IF_NONE_MATCH};
use object_store::UpdateVersion;

/// The protocol of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Provider {
    /// S3 of Amazon, and stores compatible with it.
    Amazon,
    /// Google Cloud Storage, by its XML API.
    Google,
    /// Azure Blob Storage.
    Azure,
}

/// URL schemes of buckets, before the `://`.
pub const SCHEMES: [&str; 3] = ["s3", "gs", "az"];

/// Names of a provider's settings and permissions, for remedies.
pub(crate) struct Words {
    /// Where a key and its secret are set.
    pub(crate) keys: &'static str,
    /// The permissions that are needed.
    pub(crate) rights: &'static str,
}

const GENERATION_MATCH: HeaderName = HeaderName::from_static("x-goog-if-generation-match");

impl Provider {
    /// The provider of a URL scheme.
    pub(crate) fn of(scheme: &str) -> Option<Provider> {
        use Provider::{Amazon, Azure, Google};
        let all = [Amazon, Google, Azure];
        all.into_iter().find(|one| one.scheme() == scheme)
    }

    pub(crate) fn scheme(self) -> &'static str {
        let [amazon, google, azure] = SCHEMES;
        match self {
            Provider::Amazon => amazon,
            Provider::Google => google,
            Provider::Azure => azure,
        }
    }

    /// Whether the library sent this request to the store, rather than to a credential service.
    pub(crate) fn is_asked(self, headers: &HeaderMap) -> bool {
        match self {
            Provider::Amazon => headers.contains_key("x-amz-content-sha256"),
            Provider::Google => headers.contains_key(AUTHORIZATION),
            Provider::Azure => headers.contains_key("x-ms-version"),
        }
    }

    /// The version that identifies an object among others of its key: its ETag, or its generation
    /// on Google.
    pub(crate) fn version(self, found: UpdateVersion) -> Option<String> {
        match self {
            Provider::Amazon | Provider::Azure => found.e_tag,
            Provider::Google => found.version,
        }
    }

    /// The header that makes a request depend on an object's version.
    pub(crate) fn condition(self, version: &str) -> Option<(HeaderName, HeaderValue)> {
        let name = match self {
            Provider::Amazon | Provider::Azure => IF_MATCH,
            Provider::Google => GENERATION_MATCH,
        };
        Some((name, HeaderValue::from_str(version).ok()?))
    }

    /// Whether a query is that of a listing.
    pub(crate) fn is_listing(self, query: &str) -> bool {
        let words = match self {
            Provider::Amazon | Provider::Google => "list-type=2",
            Provider::Azure => "comp=list",
        };
        query.split('&').any(|pair| pair == words)
    }

    /// Whether a request has a condition.
    pub(crate) fn is_conditional(self, headers: &HeaderMap) -> bool {
        match self {
            Provider::Amazon | Provider::Azure => {
                headers.contains_key(IF_MATCH) || headers.contains_key(IF_NONE_MATCH)
            }
            Provider::Google => headers.contains_key(GENERATION_MATCH),
        }
    }

    pub(crate) fn words(self) -> Words {
        match self {
            Provider::Amazon => Words {
                keys: "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
                rights: "s3:GetObject, s3:PutObject, s3:DeleteObject, s3:ListBucket, \
                         s3:AbortMultipartUpload and s3:ListBucketMultipartUploads",
            },
            Provider::Google => Words {
                keys: "GOOGLE_APPLICATION_CREDENTIALS to the file of a service account or of a user",
                rights: "the role roles/storage.objectUser on the bucket",
            },
            Provider::Azure => Words {
                keys: "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
                rights: "the role Storage Blob Data Contributor, or a SAS of the rights racwdl",
            },
        }
    }
}

/// A condition for the library's own requests; each provider reads one of the two fields.
pub(crate) fn only_over(version: String) -> UpdateVersion {
    UpdateVersion {
        e_tag: Some(version.clone()),
        version: Some(version),
    }
}
