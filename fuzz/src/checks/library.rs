//! Compares our parser of headers with the safetensors library's: both have the same rules.

use std::collections::BTreeMap;

use penstock_store::format::header::{Header, InvalidHeader, parse_header};
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;

/// Any text as the header of a file, preceded by its length, with as many bytes of data as the
/// first eight bytes of the input say: both parsers refuse it or read the same from it, except for
/// the differences listed in `docs/format.md`, section 5.7.
pub fn same(input: &[u8]) {
    let Some((data_bytes, text)) = input.split_first_chunk() else {
        return;
    };
    let data_bytes = u64::from_le_bytes(*data_bytes);
    let mut start = (text.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(text);
    let Some(file_bytes) = data_bytes.checked_add(start.len() as u64) else {
        return;
    };
    agree(parse_header(&start, file_bytes), of_text(text, data_bytes));
    // The call that the library's readers make takes a whole file.
    let parsed = parse_header(&start, start.len() as u64);
    agree(
        parsed,
        SafeTensors::read_metadata(&start)
            .ok()
            .map(|(_, metadata)| metadata),
    );
}

/// The metadata that the library reads from a header, if its tensors fill the data.
fn of_text(text: &[u8], data_bytes: u64) -> Option<Metadata> {
    let metadata: Metadata = serde_json::from_str(std::str::from_utf8(text).ok()?).ok()?;
    (metadata.data_len() as u64 == data_bytes).then_some(metadata)
}

fn agree(ours: Result<Header, InvalidHeader>, theirs: Option<Metadata>) {
    match (ours, theirs) {
        (Ok(header), Some(metadata)) => assert_same(&header, &metadata),
        (Ok(header), None) => assert!(
            header.tensors.iter().any(|(_, tensor)| !tensor.is_known()),
            "the library refuses {header:?}"
        ),
        (Err(InvalidHeader::Damaged { tensor, detail }), Some(metadata)) => {
            panic!("{tensor:?} {detail}, and the library reads {metadata:?}")
        }
        (Err(_), _) => {}
    }
}

fn assert_same(header: &Header, metadata: &Metadata) {
    let theirs = metadata.tensors();
    assert_eq!(header.tensors.len(), theirs.len());
    for (name, ours) in &header.tensors {
        let theirs = theirs[name];
        assert!(ours.is_known(), "{name:?} is of {}", ours.dtype);
        assert_eq!(ours.dtype, theirs.dtype.to_string(), "{name:?}");
        let shape: Vec<u64> = theirs.shape.iter().map(|&size| size as u64).collect();
        assert_eq!(ours.shape, shape, "{name:?}");
        let (begin, end) = theirs.data_offsets;
        assert_eq!(ours.data_offsets, (begin as u64, end as u64), "{name:?}");
    }
    let notes = metadata.metadata().iter().flatten();
    let notes: BTreeMap<_, _> = notes
        .map(|(key, note)| (key.clone(), note.clone()))
        .collect();
    assert_eq!(header.metadata, notes);
}
