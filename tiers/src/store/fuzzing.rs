//! What the fuzz targets run on arbitrary bytes. Not part of the interface.
//!
//! `fuzz/` feeds this from a fuzzer; the tests below feed it from proptest, so that it runs on a stable compiler too.

use super::manifest::{FILE_NAME, MAGIC, Manifest, Slot, TRAINER_BYTES_MAX, VERSION, decode, encode};
use crate::{BlobKind, BlobSpec, GroupSpec, StoreSpec, checksum};
use std::path::Path;
use std::sync::Arc;
use terrace_aio::engine::{SimConfig, SimEngine};
use terrace_aio::{IoBuf, IoEngine, OpenMode, Request};

/// Reads arbitrary bytes as a manifest, and damages a good slot as the bytes say. The first byte chooses.
///
/// # Panics
/// If the parser does, or if it accepts a slot that was damaged.
pub fn manifest(bytes: &[u8]) {
    match bytes.split_first() {
        Some((0..=79, file)) => open(file),
        Some((80..=159, file)) => open(&with_valid_header(file)),
        Some((160.., script)) => damage(script),
        None => open(&[]),
    }
}

/// Opens a file with these bytes as a manifest and looks for its newest slot.
fn open(file: &[u8]) {
    let quiet =
        SimConfig { short_one_in: 0, interrupt_one_in: 0, delay_ticks_max: 0, ..SimConfig::default() };
    let engine: Arc<dyn IoEngine> = Arc::new(SimEngine::new(quiet));
    let dir = Path::new("/fuzz");
    let write = || {
        let id = engine.open(&dir.join(FILE_NAME), OpenMode::CreateNew { len: file.len() as u64 })?;
        let mut buf = IoBuf::zeroed(file.len());
        buf.copy_from_slice(file);
        engine.submit(Request::write(id, 0, buf)).wait()?;
        engine.close(id)
    };
    write().expect("a simulated disk without faults takes a small file");
    if let Ok((manifest, _)) = Manifest::open(&engine, dir, OpenMode::Read) {
        for elements in [0, 1, 1000] {
            // An error is an answer.
            let _ = manifest.newest(&spec(elements));
        }
    }
}

/// A layout whose table has as many entries as there are `elements`.
fn spec(elements: u64) -> StoreSpec {
    StoreSpec {
        groups: vec![GroupSpec { name: "g".into(), elements }],
        kinds: vec![BlobSpec::plain(BlobKind::Weight, 2)],
        chunk_elements: 1,
        generations: 2,
        identity: String::new(),
    }
}

/// The bytes with a header over them whose magic, version and checksum are right: behind those, anything goes.
fn with_valid_header(bytes: &[u8]) -> Vec<u8> {
    let mut file = bytes.to_vec();
    file.resize(bytes.len().max(4096), 0);
    file[0..8].copy_from_slice(&MAGIC);
    file[8..12].copy_from_slice(&VERSION.to_le_bytes());
    let sum = checksum(&file[..48]);
    file[48..56].copy_from_slice(&sum.to_le_bytes());
    file
}

/// Encodes a slot and changes bytes of it: it then reads as what it was or not at all.
fn damage(script: &[u8]) {
    let at = |i: usize| script.get(i).copied().unwrap_or(0);
    let table: Vec<u64> = (0..u64::from(at(0)) % 40).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let trainer = script.iter().cycle().take(usize::from(at(1)) * 64).copied().collect::<Vec<u8>>();
    assert!(trainer.len() <= TRAINER_BYTES_MAX);
    let slot = Slot {
        is_mark: at(5) % 2 == 1,
        sequence: u64::from(at(2)),
        step: u64::from(at(3)),
        live: u64::from(at(4) & 1),
        table,
        trainer,
    };
    let table_len = slot.table.len();
    let used = 48 + table_len * 8 + slot.trainer.len() + 8;
    let mut page = encode(&slot, used.next_multiple_of(4096));
    for change in script.get(5..).unwrap_or_default().chunks_exact(3) {
        let position = usize::from(change[0]) << 8 | usize::from(change[1]);
        let len = page.len();
        page[position % len] ^= change[2];
    }
    if let Some(read) = decode(&page, table_len) {
        assert_eq!(read, slot, "a damaged slot was accepted");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    fn header(spec_bytes: u64, slot_bytes: u64) -> Vec<u8> {
        let mut input = vec![80u8; 1 + 16];
        for word in [1, spec_bytes, slot_bytes, 0] {
            input.extend(u64::to_le_bytes(word));
        }
        input
    }

    #[test]
    fn lengths_that_overflow_are_refused() {
        let large = [0, 1, 55, 4095, 4096, 1 << 40, i64::MAX as u64, u64::MAX - 4096, u64::MAX];
        for spec_bytes in large {
            for slot_bytes in large {
                super::manifest(&header(spec_bytes, slot_bytes));
            }
        }
    }

    proptest! {
        #[test]
        fn manifests(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            super::manifest(&bytes);
        }

        #[test]
        fn damaged_slots(bytes in proptest::collection::vec(any::<u8>(), 5..60)) {
            super::manifest(&[&[200], &bytes[..]].concat());
        }
    }
}
