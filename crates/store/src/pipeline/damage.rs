//! Damage: a chunk that differs from what was written, and how precisely its position is known.

use std::ops::Range;

/// A chunk whose bytes differ from those written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Damage {
    /// Index of the file.
    pub(crate) file: usize,
    /// The chunk's bytes.
    pub(crate) range: Range<u64>,
    /// The changed byte, if it is only one.
    pub(crate) byte: Option<u64>,
    /// Why the chunk could not be read, if it could not.
    pub(crate) unreadable: Option<String>,
    /// Whether the chunk matches its digest, and does not open.
    pub(crate) is_tampered: bool,
}

impl Damage {
    /// Position of the damage: the byte, or else the start of the chunk.
    pub(crate) fn offset(&self) -> u64 {
        self.byte.unwrap_or(self.range.start)
    }

    /// Description of the damage.
    pub(crate) fn detail(&self) -> String {
        if self.is_tampered {
            return "the chunk that begins here is not the one that was sealed for this place"
                .to_owned();
        }
        match (&self.unreadable, self.byte) {
            (Some(reason), _) => format!("the bytes from here on cannot be read: {reason}"),
            (None, Some(_)) => "this byte is not the one that was written".to_owned(),
            (None, None) => "the bytes from here on do not match their digest".to_owned(),
        }
    }

    /// Whether the damage is, or may be, within these bytes of its file.
    pub(crate) fn touches(&self, (begin, end): (u64, u64)) -> bool {
        match self.byte {
            Some(byte) => begin <= byte && byte < end,
            None => begin < self.range.end && self.range.start < end,
        }
    }
}
