//! Bytes of others: a manifest's wraps and texts of keys. Any of them is refused by an error that
//! shows no secret, and a changed wrap never gives another key.

use penstock_keys::{
    DataKey, Identities, KeyError, Keyring, RECIPIENTS_MAX, Recipients, Unwrap, Wrap,
};
use proptest::prelude::*;
use zeroize::Zeroizing;

const SYMMETRIC: &str =
    "PENSTOCK-SECRET-KEY-1000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
/// The key of age's documentation.
const X25519: &str = "AGE-SECRET-KEY-1N9JEPW6DWJ0ZQUDX63F5A03GX8QUW7PXDE39N8UYF82VZ9PC8UFS3M7XA9";

fn keyring() -> Keyring {
    let mut keyring = Keyring::new();
    for (name, text) in [("keys[0]", SYMMETRIC), ("keys[1]", X25519)] {
        keyring.add_text(name, text).unwrap();
    }
    keyring
}

fn identities() -> Identities {
    Identities::new(keyring(), None).unwrap()
}

/// A data key and its wraps for both keys.
fn wrapped() -> (DataKey, Vec<Wrap>) {
    let key = DataKey::generate().unwrap();
    let wraps = Recipients::new(keyring(), None)
        .unwrap()
        .wrap(&key)
        .unwrap();
    (key, wraps)
}

fn kind() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("key-file".to_owned()),
        Just("age".to_owned()),
        Just("kms".to_owned()),
        "[a-z-]{0,12}"
    ]
}

proptest! {
    #[test]
    fn any_bytes_are_no_wrap(
        kind in kind(),
        index in 0..2_usize,
        key in proptest::collection::vec(any::<u8>(), 0..400),
    ) {
        let recipient = wrapped().1.swap_remove(index).recipient;
        let wrap = Wrap { kind, recipient, key };
        prop_assert!(identities().unwrap(&[wrap]).is_err());
    }

    #[test]
    fn a_changed_wrap_gives_the_same_key_or_none(
        index in 0..2_usize,
        place in any::<prop::sample::Index>(),
        bits in 1..=u8::MAX,
    ) {
        let (key, mut wraps) = wrapped();
        let mut wrap = wraps.swap_remove(index);
        let place = place.index(wrap.key.len());
        wrap.key[place] ^= bits;
        if let Ok(opened) = identities().unwrap(&[wrap]) {
            prop_assert_eq!(opened.expose(), key.expose());
        }
    }

    #[test]
    fn a_cut_wrap_does_not_open(index in 0..2_usize, place in any::<prop::sample::Index>()) {
        let mut wrap = wrapped().1.swap_remove(index);
        let length = place.index(wrap.key.len());
        wrap.key.truncate(length);
        prop_assert!(identities().unwrap(&[wrap]).is_err());
    }

    #[test]
    fn any_content_is_a_key_or_an_error(content in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = Keyring::new().add_content("keys[0]", &content);
    }

    #[test]
    fn a_mistyped_key_is_not_shown(
        symmetric in any::<bool>(),
        place in any::<prop::sample::Index>(),
        typed in "[!-~]",
    ) {
        let right = if symmetric { SYMMETRIC } else { X25519 };
        let place = place.index(right.len());
        let wrong = format!("{}{typed}{}", &right[..place], &right[place + 1..]);
        let mut keyring = Keyring::new();
        if let Err(error) = keyring.add_text("keys[0]", &wrong) {
            let shown = format!("{error} {error:?}");
            prop_assert!(!shown.contains(&wrong[wrong.len() - 20..]));
            prop_assert!(!shown.contains(&wrong[..20]));
        }
    }
}

#[test]
fn a_stranger_wrap_before_the_right_one_does_not_hide_it() {
    let (key, wraps) = wrapped();
    for wrap in wraps {
        let key_bytes = vec![0; wrap.key.len()];
        let forged = Wrap {
            key: key_bytes,
            ..wrap.clone()
        };
        let opened = identities().unwrap(&[forged, wrap]).unwrap();
        assert_eq!(opened.expose(), key.expose());
    }
}

fn passphrase() -> Identities {
    let mut keyring = Keyring::new();
    keyring
        .add_passphrase("keys[0]", Zeroizing::new(b"sesame".to_vec()))
        .unwrap();
    Identities::new(keyring, None).unwrap()
}

/// A manifest is not authenticated before its key is found, so its wraps are worth little work.
#[test]
fn many_wraps_and_costly_derivations_are_refused() {
    let wrap = |index: usize, memory_kib: u32| Wrap {
        kind: "passphrase".into(),
        recipient: format!("$argon2id$v=19$m={memory_kib},t=4,p=1$c29tZXNhbHQ0{index:04}"),
        key: vec![0; 40],
    };
    let many: Vec<_> = (0..=RECIPIENTS_MAX).map(|index| wrap(index, 8)).collect();
    let refused = passphrase().unwrap(&many).unwrap_err().to_string();
    assert!(
        refused.contains("there are 257 wraps: at most 256"),
        "{refused}"
    );
    let refused = passphrase().unwrap(&[wrap(0, 8)]).unwrap_err();
    assert!(matches!(refused, KeyError::WrongKey { .. }), "{refused}");
    // The second alone would be allowed; both are not, and the second is not begun.
    let refused = passphrase()
        .unwrap(&[wrap(0, 8), wrap(1, 1 << 20)])
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("the derivations of all passphrases take too long"),
        "{refused}"
    );
}
