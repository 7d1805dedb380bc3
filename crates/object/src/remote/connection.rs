//! The connection string that Azure's tools take from the environment.
//!
//! The client library does not read it, although the emulator and the portal hand it out. Its
//! fields and the emulator's settings:
//! <https://learn.microsoft.com/azure/storage/common/storage-configure-connection-string>.

use std::collections::HashMap;
use std::env;

use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};

use super::env_bool::env_bool;

const VARIABLE: &str = "AZURE_STORAGE_CONNECTION_STRING";

/// Variables that tell the client library to use an emulator, and its URL.
const USES_EMULATOR: &str = "AZURE_STORAGE_USE_EMULATOR";
const EMULATOR_URL: &str = "AZURITE_BLOB_STORAGE_URL";

/// The emulator's public account and key.
const EMULATOR: [(&str, &str); 3] = [
    ("accountname", "devstoreaccount1"),
    (
        "accountkey",
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    ),
    ("blobendpoint", "http://127.0.0.1:10000/devstoreaccount1"),
];

/// The fields of a connection string.
#[derive(Debug, Default)]
pub(crate) struct Connection(HashMap<String, String>);

impl Connection {
    pub(crate) fn of_environment() -> Connection {
        let said = |name: &str| env::var(name).unwrap_or_default();
        if !env_bool(Some(&said(USES_EMULATOR))) {
            return Connection::of(&said(VARIABLE));
        }
        let mut connection = Connection::of("UseDevelopmentStorage=true");
        let url = said(EMULATOR_URL);
        if !url.is_empty() {
            let account = connection.get("accountname").cloned().unwrap_or_default();
            let endpoint = format!("{}/{account}", url.trim_end_matches('/'));
            connection.0.insert("blobendpoint".to_owned(), endpoint);
        }
        connection
    }

    fn of(text: &str) -> Connection {
        let pairs = text.split(';').filter_map(|pair| {
            let (name, value) = pair.split_once('=')?;
            Some((name.trim().to_ascii_lowercase(), value.trim().to_owned()))
        });
        let mut said: HashMap<String, String> = pairs.collect();
        if said
            .get("usedevelopmentstorage")
            .is_some_and(|said| env_bool(Some(said)))
        {
            let known = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
            said.extend(EMULATOR.map(known));
        }
        Connection(said)
    }

    fn get(&self, name: &str) -> Option<&String> {
        self.0.get(name)
    }

    /// A builder from the connection string alone, as Azure's own tools do it, or from the
    /// environment if there is none.
    pub(crate) fn builder(&self) -> MicrosoftAzureBuilder {
        let mut builder = match self.0.is_empty() {
            true => MicrosoftAzureBuilder::from_env(),
            false => MicrosoftAzureBuilder::new(),
        };
        let named = |name: &str| env::var(name).ok();
        let said = [
            (
                AzureConfigKey::AccountName,
                "accountname",
                "AZURE_STORAGE_ACCOUNT",
            ),
            (AzureConfigKey::AccessKey, "accountkey", "AZURE_STORAGE_KEY"),
            (AzureConfigKey::SasKey, "sharedaccesssignature", ""),
        ];
        for (key, name, of_tools) in said {
            let value = match self.0.is_empty() {
                true => named(of_tools),
                false => self.get(name).cloned(),
            };
            let is_open = builder
                .get_config_value(&key)
                .is_none_or(|had| had.is_empty());
            if let (Some(value), true) = (value, is_open) {
                builder = builder.with_config(key, value);
            }
        }
        // The emulator's URL is an endpoint like any other.
        builder.with_use_emulator(false)
    }

    /// URL of the account.
    pub(crate) fn endpoint(&self) -> Option<String> {
        if let Some(endpoint) = self.get("blobendpoint") {
            return Some(endpoint.trim_end_matches('/').to_owned());
        }
        let account = self.get("accountname")?;
        let suffix = self
            .get("endpointsuffix")
            .map_or("core.windows.net", String::as_str);
        let scheme = self
            .get("defaultendpointsprotocol")
            .map_or("https", String::as_str);
        Some(format!("{scheme}://{account}.blob.{suffix}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_whose_account_it_is_and_where_it_answers() {
        let text = "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=a2V5PT0=;\
                    EndpointSuffix=core.windows.net";
        let builder = Connection::of(text).builder();
        let said = |key: AzureConfigKey| builder.get_config_value(&key).unwrap();
        assert_eq!(said(AzureConfigKey::AccountName), "me");
        assert_eq!(said(AzureConfigKey::AccessKey), "a2V5PT0=");
        let endpoint = |text: &str| Connection::of(text).endpoint();
        assert_eq!(endpoint(text).unwrap(), "https://me.blob.core.windows.net");
        let text = "BlobEndpoint=http://127.0.0.1:1/me/;SharedAccessSignature=sv=1&sig=x";
        let builder = Connection::of(text).builder();
        let said = |key: AzureConfigKey| builder.get_config_value(&key).unwrap();
        assert_eq!(endpoint(text).unwrap(), "http://127.0.0.1:1/me");
        assert_eq!(endpoint(""), None);
        let short = endpoint("AccountName=me;AccountKey=a2V5").unwrap();
        assert_eq!(short, "https://me.blob.core.windows.net");
        let emulator = endpoint("UseDevelopmentStorage=true").unwrap();
        assert_eq!(emulator, "http://127.0.0.1:10000/devstoreaccount1");
        assert_eq!(said(AzureConfigKey::SasKey), "sv=1&sig=x");
    }
}
