//! AWS's files in a home directory: the keys, region and endpoint of a profile.
//!
//! Format and names: <https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html>. Of
//! the ways to obtain a key only `credential_process` is run here; single sign-on and roles need
//! AWS's own tool, which a `credential_process` of `aws configure export-credentials` calls.

use std::env;
use std::io;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::SystemTime;

use ini::{Ini, ParseOption, Properties};
use serde::Deserialize;

use super::credentials::{Credentials, Keys};

/// The settings of a profile.
#[derive(Debug, Default)]
pub(crate) struct Profile {
    pub(crate) credentials: Option<Credentials>,
    pub(crate) region: Option<String>,
    pub(crate) endpoint: Option<String>,
}

impl Profile {
    /// The profile that the environment names, or the default one; empty if there is none.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a named profile that does not exist, and for an
    /// unreadable file.
    pub(crate) fn of_environment() -> io::Result<Profile> {
        let named = env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty());
        let name = named.as_deref().unwrap_or("default");
        let keys = file("AWS_SHARED_CREDENTIALS_FILE", "credentials")?;
        let config = file("AWS_CONFIG_FILE", "config")?;
        // In this file every section but the default is headed `profile NAME`.
        let heading = format!("profile {name}");
        let sections = [
            keys.as_ref().and_then(|file| file.section(Some(name))),
            config.as_ref().and_then(|file| file.section(Some(heading))),
            config
                .as_ref()
                .filter(|_| name == "default")
                .and_then(|file| file.section(Some(name))),
        ];
        let sections: Vec<&Properties> = sections.into_iter().flatten().collect();
        if let (true, Some(name)) = (sections.is_empty(), named) {
            let detail =
                format!("AWS_PROFILE={name}: there is no such profile in the files of ~/.aws");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        let value = |name: &str| {
            let value = sections.iter().find_map(|section| section.get(name));
            value.map(str::to_owned)
        };
        Ok(Profile {
            credentials: credentials(value),
            region: value("region"),
            endpoint: value("endpoint_url"),
        })
    }
}

fn credentials(value: impl Fn(&str) -> Option<String>) -> Option<Credentials> {
    let (id, secret) = (value("aws_access_key_id"), value("aws_secret_access_key"));
    if let (Some(id), Some(secret)) = (id, secret) {
        return Some(Credentials::Given(Keys {
            id,
            secret,
            token: value("aws_session_token"),
            expires: None,
        }));
    }
    let command = value("credential_process")?;
    Some(Credentials::Asked(Arc::new(move || made_by(&command))))
}

/// Loads the file that a variable names, or the default one in the home directory.
fn file(variable: &str, name: &str) -> io::Result<Option<Ini>> {
    let in_home = || Some(PathBuf::from(env::var_os("HOME")?).join(".aws").join(name));
    let Some(path) = env::var_os(variable).map(PathBuf::from).or_else(in_home) else {
        return Ok(None);
    };
    // A backslash in a value is literal.
    let options = ParseOption {
        enabled_escape: false,
        enabled_quote: false,
        ..ParseOption::default()
    };
    match Ini::load_from_file_opt(&path, options) {
        Ok(file) => Ok(Some(file)),
        Err(ini::Error::Io(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let detail = format!("{}: {error}", path.display());
            Err(io::Error::new(io::ErrorKind::InvalidInput, detail))
        }
    }
}

/// The output of a `credential_process`.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Printed {
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<jiff::Timestamp>,
}

fn made_by(command: &str) -> io::Result<Keys> {
    let output = Command::new("sh").args(["-c", command]).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim();
        let detail = format!("credential_process ended with {}: {said}", output.status);
        return Err(io::Error::other(detail));
    }
    let printed: Printed = serde_json::from_slice(&output.stdout)
        // The output may contain a part of a secret; the error's text does not.
        .map_err(|error| io::Error::other(format!("credential_process printed: {error}")))?;
    Ok(Keys {
        id: printed.access_key_id,
        secret: printed.secret_access_key,
        token: printed.session_token,
        expires: printed.expiration.map(SystemTime::from),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(text: &str) -> Option<Credentials> {
        let file = Ini::load_from_str(text).unwrap();
        let section = file.section(Some("default")).unwrap();
        credentials(|name| section.get(name).map(str::to_owned))
    }

    #[test]
    fn a_profile_gives_a_key_or_a_command_that_makes_one() {
        let text = "[default]\naws_access_key_id = me\naws_secret_access_key=a+b/c=\n";
        let Some(Credentials::Given(keys)) = given(text) else {
            panic!("no key");
        };
        assert_eq!((keys.id.as_str(), keys.secret.as_str()), ("me", "a+b/c="));
        assert!(given("[default]\nregion = x\n").is_none());
        let printed = r#"{"Version":1,"AccessKeyId":"a","SecretAccessKey":"b","SessionToken":"t","Expiration":"2033-01-01T00:00:00Z"}"#;
        let keys = made_by(&format!("echo '{printed}'")).unwrap();
        assert_eq!(keys.token.as_deref(), Some("t"));
        assert!(keys.expires.unwrap() > SystemTime::now());
    }

    #[test]
    fn a_command_that_fails_says_why() {
        let text = made_by("echo no session >&2; exit 3")
            .unwrap_err()
            .to_string();
        assert!(text.contains("no session") && text.contains('3'), "{text}");
        assert!(made_by("echo {}").is_err());
    }
}
