//! What the fuzz targets run on arbitrary bytes. Not part of the interface.
//!
//! `fuzz/` feeds this from a fuzzer; the tests below feed it from proptest, so that it runs on a stable compiler too.

use super::manifest::{FILE_NAME, MAGIC, Manifest, Slot, TRAINER_BYTES_MAX, VERSION, decode, encode};
use crate::{BlobKind, BlobSpec, GroupSpec, StoreSpec, checksum};
use std::path::Path;
use std::sync::Arc;
use terrace_aio::engine::{SimConfig, SimEngine};
use terrace_aio::{IoBuf, IoEngine, OpenMode, Request};

/// Reads arbitrary bytes as a manifest, and damages a good slot or a good manifest as the bytes say. The first byte chooses.
///
/// # Panics
/// If the parser does, if it accepts a slot that was damaged, or if damage of one block of a manifest costs more than a step.
pub fn manifest(bytes: &[u8]) {
    match bytes.split_first() {
        Some((0..=79, file)) => open(file),
        Some((80..=119, file)) => open(&with_valid_header(file, 0)),
        Some((120..=159, file)) => open(&with_valid_header(file, file.len().next_multiple_of(4096))),
        Some((160..=207, script)) => damage(script),
        Some((208.., script)) => damage_block(script),
        None => open(&[]),
    }
}

/// Opens a file with these bytes as a manifest and looks for its newest slot.
fn open(file: &[u8]) {
    let (engine, dir) = (disk(), Path::new("/fuzz"));
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

/// A disk without faults.
fn disk() -> Arc<dyn IoEngine> {
    let quiet =
        SimConfig { short_one_in: 0, interrupt_one_in: 0, delay_ticks_max: 0, ..SimConfig::default() };
    Arc::new(SimEngine::new(quiet))
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

/// The bytes with a header over them at `at` whose magic, version and checksum are right: behind those, anything goes. There it has
/// the words of the first one.
fn with_valid_header(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut file = bytes.to_vec();
    file.resize(bytes.len().max(at + 4096), 0);
    let words: Vec<u8> = file[16..48].to_vec();
    let head = &mut file[at..at + 56];
    head[0..8].copy_from_slice(&MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_le_bytes());
    head[16..48].copy_from_slice(&words);
    let sum = checksum(&head[..48]);
    head[48..56].copy_from_slice(&sum.to_le_bytes());
    file
}

/// Changes bytes of one block of a manifest with two commits: the newest or the one before is there, and with its other copy every
/// part of the layout.
fn damage_block(script: &[u8]) {
    let at = |i: usize| script.get(i).copied().unwrap_or(0);
    let (engine, dir, spec) = (disk(), Path::new("/fuzz"), spec(1 + u64::from(at(0))));
    let slot = |sequence: u64| Slot {
        is_mark: at(1) % 4 == sequence as u8,
        sequence,
        step: sequence * 7,
        live: sequence % 2,
        table: vec![sequence; spec.table_len()],
        trainer: vec![at(2); usize::from(at(3))],
    };
    let make = || {
        let made = Manifest::create(&engine, dir, &spec, 5)?;
        (1..=2).try_for_each(|sequence| made.write(&slot(sequence)))
    };
    make().expect("a simulated disk without faults takes a manifest");
    let file = engine.open(&dir.join(FILE_NAME), OpenMode::ReadWrite).expect("it is there");
    let blocks = engine.len(file).expect("it is open") / 4096;
    let block = u64::from(at(4)) % blocks * 4096;
    let mut page =
        engine.submit(Request::read(file, block, IoBuf::zeroed(4096))).wait().expect("it can be read");
    for change in script.get(5..).unwrap_or_default().chunks_exact(3) {
        page[usize::from(change[0] % 16) << 8 | usize::from(change[1])] ^= change[2];
    }
    engine.submit(Request::write(file, block, page)).wait().expect("it can be written");
    let (manifest, found) = Manifest::open(&engine, dir, OpenMode::ReadWrite).expect("one block is damaged");
    assert_eq!(found, spec);
    let (newest, _) = manifest.newest(&spec).expect("one slot is whole").expect("there are two commits");
    assert!(newest == slot(2) || newest == slot(1), "a damaged slot was accepted");
    manifest.mend().expect("a simulated disk without faults is written");
    let (mended, _) = Manifest::open(&engine, dir, OpenMode::Read).expect("it was open before");
    assert_eq!(mended.damaged_copies().count(), 0);
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

    /// A header in the last page whose words are those of a manifest, over a layout that is none.
    #[test]
    fn a_second_header_is_found() {
        let words = [1u64, 8, 4096, crate::checksum(b"not json")];
        let mut file = vec![0; 16];
        words.iter().for_each(|word| file.extend(word.to_le_bytes()));
        file.resize(4096, 0);
        file.extend(b"not json");
        file.resize(4 * 4096 + 10, 0);
        super::manifest(&[&[120], &file[..]].concat());
        for block in 0..20 {
            super::manifest(&[208, 40, 0, 7, 200, block, 0, 0, 255, 0, 48, 1, 0, 60, 1, 0, 100, 9]);
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

        #[test]
        fn damaged_blocks(bytes in proptest::collection::vec(any::<u8>(), 5..60)) {
            super::manifest(&[&[220], &bytes[..]].concat());
        }
    }
}
