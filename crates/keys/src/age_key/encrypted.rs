//! Files of identities that `age -p` has encrypted with a passphrase.

use std::io::Read;
use std::iter;

use age::secrecy::SecretString;
use age::{Decryptor, scrypt};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use zeroize::Zeroizing;

use crate::passphrase::Passphrase;

const BINARY: &[u8] = b"age-encryption.org/";
const BEGIN: &str = "-----BEGIN AGE ENCRYPTED FILE-----";
const END: &str = "-----END AGE ENCRYPTED FILE-----";

/// Bytes of a file of identities.
const TEXT_BYTES_MAX: usize = 64 << 10;

/// Logarithm of the cost of scrypt that a file may ask for: 1 GiB of memory, and some seconds.
/// `age -p` takes 18.
const WORK_FACTOR_MAX: u8 = 20;

/// Whether a file is encrypted by age.
pub(crate) fn is_encrypted(content: &[u8]) -> bool {
    let start = content.trim_ascii_start();
    start.starts_with(BINARY) || start.starts_with(BEGIN.as_bytes())
}

/// Decrypts a file with the first passphrase that fits.
pub(crate) fn open(
    content: &[u8],
    passphrases: &[&Passphrase],
) -> Result<Zeroizing<Vec<u8>>, &'static str> {
    let file = binary(content).ok_or("it is a damaged file of age")?;
    let damaged = |_| "it is a damaged file of age";
    if !Decryptor::new(file.as_slice())
        .map_err(damaged)?
        .is_scrypt()
    {
        return Err(
            "it is encrypted for other keys: decrypt it with `age -d`, and give the result by a \
             callable or a pipe",
        );
    }
    if passphrases.is_empty() {
        return Err("it has a passphrase: give that before the file, among the identities");
    }
    for passphrase in passphrases {
        let Ok(text) = std::str::from_utf8(passphrase.expose()) else {
            continue;
        };
        let mut identity = scrypt::Identity::new(SecretString::from(text));
        identity.set_max_work_factor(WORK_FACTOR_MAX);
        let decryptor = Decryptor::new(file.as_slice()).map_err(damaged)?;
        let reader = match decryptor.decrypt(iter::once(&identity as &dyn age::Identity)) {
            Ok(reader) => reader,
            Err(age::DecryptError::ExcessiveWork { .. }) => {
                return Err("its passphrase takes too much work: encrypt it again with `age -p`");
            }
            Err(_) => continue,
        };
        // All at once, as a vector that grows leaves copies in freed memory.
        let mut text = Zeroizing::new(Vec::with_capacity(TEXT_BYTES_MAX + 1));
        let read = reader
            .take(TEXT_BYTES_MAX as u64 + 1)
            .read_to_end(&mut text);
        return match read {
            Ok(bytes) if bytes <= TEXT_BYTES_MAX => Ok(text),
            Ok(_) => Err("it is larger than 64 KiB, so it is no file of keys"),
            Err(_) => Err("it is a damaged file of age"),
        };
    }
    Err("no passphrase that stands before it opens it")
}

/// The file without its armor.
fn binary(content: &[u8]) -> Option<Vec<u8>> {
    let start = content.trim_ascii_start();
    if start.starts_with(BINARY) {
        return Some(start.to_vec());
    }
    let text = std::str::from_utf8(start).ok()?.trim_end();
    let body = text.strip_prefix(BEGIN)?.strip_suffix(END)?;
    let digits: String = body.split_ascii_whitespace().collect();
    STANDARD.decode(digits).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"# a comment\nAGE-SECRET-KEY-1QQQQ\n";

    fn passphrase(text: &str) -> Passphrase {
        Passphrase::new(Zeroizing::new(text.as_bytes().to_vec())).unwrap()
    }

    /// As `age -p` does, with less work.
    fn encrypt(text: &[u8], secret: &str) -> Vec<u8> {
        let mut recipient = scrypt::Recipient::new(SecretString::from(secret));
        recipient.set_work_factor(4);
        age::encrypt(&recipient, text).unwrap()
    }

    fn armored(file: &[u8]) -> Vec<u8> {
        let digits = STANDARD.encode(file);
        let lines = digits.as_bytes().chunks(64);
        let lines: Vec<_> = lines
            .map(|line| std::str::from_utf8(line).unwrap())
            .collect();
        format!("{BEGIN}\n{}\n{END}\n", lines.join("\n")).into_bytes()
    }

    #[test]
    fn the_first_passphrase_that_fits_opens_a_file_and_its_armor() {
        let (wrong, right) = (passphrase("wrong"), passphrase("right\n"));
        let file = encrypt(TEXT, "right");
        for content in [file.clone(), armored(&file)] {
            assert!(is_encrypted(&content));
            let opened = open(&content, &[&wrong, &right]).unwrap();
            assert_eq!(opened.as_slice(), TEXT);
            assert!(
                open(&content, &[&wrong])
                    .unwrap_err()
                    .contains("no passphrase")
            );
            assert!(open(&content, &[]).unwrap_err().contains("before the file"));
        }
    }

    #[test]
    fn damaged_files_and_those_of_other_kinds_are_refused() {
        let right = passphrase("right");
        let file = encrypt(TEXT, "right");
        for length in 0..file.len() {
            if is_encrypted(&file[..length]) {
                open(&file[..length], &[&right]).unwrap_err();
            }
        }
        let last = file.len() - 1;
        let mut changed = file.clone();
        changed[last] ^= 1;
        assert!(open(&changed, &[&right]).unwrap_err().contains("damaged"));
        let recipient = age::x25519::Identity::generate().to_public();
        let other = age::encrypt(&recipient, TEXT).unwrap();
        assert!(open(&other, &[&right]).unwrap_err().contains("other keys"));
        let large = encrypt(&vec![b'#'; TEXT_BYTES_MAX + 1], "right");
        assert!(open(&large, &[&right]).unwrap_err().contains("64 KiB"));
    }
}
