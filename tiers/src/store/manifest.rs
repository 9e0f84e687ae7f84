//! The manifest: which generation is live, and the checksum of every chunk in it.
//!
//! ```text
//! manifest.bin
//! | header page (4 KiB)                          | spec (JSON), padded to 4 KiB | slot 0    | slot 1    |
//! | magic 8 | version 4 | 0 4 | volume id 8 |
//! | spec bytes 8 | slot bytes 8 | checksum of the spec 8 | checksum of this header 8 |
//!
//! slot, padded to 4 KiB
//! | magic 8 | sequence 8 | step 8 | live generation 8 | table entries 8 | trainer bytes 8 | table 8·n | trainer | checksum 8 |
//! ```
//! The magic number says what the slot is: a commit, or the mark that a store with one generation is being overwritten since
//! the commit that the mark repeats. A mark goes where the next commit would, and is durable before the first byte changes;
//! the commit that follows goes to the other place. So the newest slot is a commit only while its chunks are there.
//!
//! A commit writes the slot that is *not* the newest one and then syncs: a torn write leaves the other slot valid. The
//! valid slot with the higher sequence number is the state. Sequence numbers begin at 1, so slot 0 is first written when
//! slot 1 is durable.
//!
//! Creation makes the spec durable before it writes the header, whose words lie in one sector: a manifest has either no
//! header, and was never committed, or a whole one and its spec.

use crate::file::OpenFile;
use crate::{StoreSpec, TierError, checksum};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace_aio::{IoBuf, IoEngine, OpenMode, Request};

pub(super) const FILE_NAME: &str = "manifest.bin";
const PAGE: usize = 4096;
pub(super) const MAGIC: [u8; 8] = *b"TRCMANIF";
const SLOT_MAGIC: [u8; 8] = *b"TRCSLOT1";
const MARK_MAGIC: [u8; 8] = *b"TRCMARK1";
pub(super) const VERSION: u32 = 2;
const SLOT_HEADER: usize = 48;
/// Room for the trainer's own words in every slot.
pub(super) const TRAINER_BYTES_MAX: usize = 16 << 10;

/// The contents of one slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slot {
    /// No commit: the chunks of the one that this repeats are being overwritten.
    pub(super) is_mark: bool,
    pub(super) sequence: u64,
    pub(super) step: u64,
    pub(super) live: u64,
    pub(super) table: Vec<u64>,
    pub(super) trainer: Vec<u8>,
}

/// What one of the two places for a slot holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// Zeros: nothing was ever written there.
    Blank,
    /// No whole slot: damaged, or a commit that was cut off.
    Torn(Option<Claim>),
    /// A slot as it was written, a commit or a mark.
    Whole(Slot),
}

/// What the header of a slot that is not whole says, which may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) sequence: u64,
    pub(super) step: u64,
}

#[derive(Debug)]
pub(super) struct Manifest {
    engine: Arc<dyn IoEngine>,
    file: OpenFile,
    pub(super) path: PathBuf,
    pub(super) id: u64,
    slots_at: u64,
    slot_bytes: usize,
}

impl Manifest {
    pub(super) fn create(
        engine: &Arc<dyn IoEngine>,
        dir: &Path,
        spec: &StoreSpec,
        id: u64,
    ) -> Result<Self, TierError> {
        let path = dir.join(FILE_NAME);
        if engine.exists(&path) {
            engine.remove(&path)?;
        }
        let text = serde_json::to_vec(spec).expect("a store spec is plain data");
        let slot_bytes = (SLOT_HEADER + spec.table_len() * 8 + TRAINER_BYTES_MAX + 8).next_multiple_of(PAGE);
        let slots_at = (PAGE + text.len().next_multiple_of(PAGE)) as u64;
        let len = slots_at + 2 * slot_bytes as u64;
        let file = OpenFile::open(engine, &path, OpenMode::CreateNew { len })?;

        let mut padded = IoBuf::zeroed(slots_at as usize - PAGE);
        padded[..text.len()].copy_from_slice(&text);
        let mut head = IoBuf::zeroed(PAGE);
        head[0..8].copy_from_slice(&MAGIC);
        head[8..12].copy_from_slice(&VERSION.to_le_bytes());
        for (at, value) in [(16, id), (24, text.len() as u64), (32, slot_bytes as u64), (40, checksum(&text))]
        {
            head[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let sum = checksum(&head[..48]);
        head[48..56].copy_from_slice(&sum.to_le_bytes());
        for (offset, page) in [(PAGE as u64, padded), (0, head)] {
            engine.submit(Request::write(file.id, offset, page)).wait()?;
            engine.sync(file.id).wait()?;
        }
        Ok(Self { engine: Arc::clone(engine), file, path, id, slots_at, slot_bytes })
    }

    /// Opens a manifest and gives its spec.
    pub(super) fn open(
        engine: &Arc<dyn IoEngine>,
        dir: &Path,
        mode: OpenMode,
    ) -> Result<(Self, StoreSpec), TierError> {
        let path = dir.join(FILE_NAME);
        let damaged = |detail: &str| TierError::NoLayout { path: path.clone(), detail: detail.into() };
        let file = match OpenFile::open(engine, &path, mode) {
            Ok(file) => file,
            Err(error) if crate::volume::is_missing(&error) => {
                return Err(TierError::NoState { path: path.clone(), detail: "there is no manifest".into() });
            }
            Err(error) => return Err(error.into()),
        };
        let len = engine.len(file.id)?;
        if len < PAGE as u64 {
            return Err(TierError::NoState {
                path: path.clone(),
                detail: "its manifest was never written".into(),
            });
        }
        let head = engine.submit(Request::read(file.id, 0, IoBuf::zeroed(PAGE))).wait()?;
        let word = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
        if head.iter().all(|&b| b == 0) {
            return Err(TierError::NoState {
                path: path.clone(),
                detail: "its manifest was never written".into(),
            });
        }
        if head[0..8] != MAGIC || word(48) != checksum(&head[..48]) {
            return Err(damaged("the manifest's header is not one of ours"));
        }
        let version = u32::from_le_bytes(head[8..12].try_into().expect("four bytes"));
        if version != VERSION {
            return Err(damaged(&format!(
                "it has format version {version}; this program reads version {VERSION}"
            )));
        }
        let (id, spec_len, slot_bytes) = (word(16), word(24), word(32));
        let slots_at =
            spec_len.checked_next_multiple_of(PAGE as u64).and_then(|bytes| bytes.checked_add(PAGE as u64));
        let end = slots_at.and_then(|at| at.checked_add(slot_bytes.checked_mul(2)?));
        let (Some(slots_at), true) = (slots_at, end.is_some_and(|end| end <= len)) else {
            return Err(damaged("the manifest was truncated"));
        };
        // Both are less than the file's length, and slots are read whole.
        let (spec_len, slot_bytes) = (spec_len as usize, slot_bytes as usize);
        let padded = IoBuf::zeroed(spec_len.next_multiple_of(PAGE));
        let text = engine.submit(Request::read(file.id, PAGE as u64, padded)).wait()?;
        let text = &text[..spec_len];
        if checksum(text) != word(40) {
            return Err(damaged("the manifest's layout has a wrong checksum"));
        }
        let spec =
            serde_json::from_slice(text).map_err(|e| damaged(&format!("the layout cannot be read: {e}")))?;
        Ok((Self { engine: Arc::clone(engine), file, path, id, slots_at, slot_bytes }, spec))
    }

    /// The newest valid slot, if any was ever committed. It may be a mark.
    pub(super) fn newest(&self, spec: &StoreSpec) -> Result<Option<Slot>, TierError> {
        let found = self.slots(spec)?;
        // A torn first commit leaves slot 0 blank; anything in it means that there was a whole one.
        let is_lost = found[0] != Found::Blank;
        let newest = found.into_iter().filter_map(Found::whole).max_by_key(|slot| slot.sequence);
        if newest.is_none() && is_lost {
            let detail = "neither of the two slots of its manifest is whole".into();
            return Err(TierError::Damaged { path: self.path.clone(), detail });
        }
        Ok(newest)
    }

    /// What both places hold.
    pub(super) fn slots(&self, spec: &StoreSpec) -> Result<[Found; 2], TierError> {
        let table_len = spec.table_len();
        let found = |index: u64| -> Result<Found, TierError> {
            let page = self.slot_page(index)?;
            let is_sound = |slot: &Slot| slot.sequence % 2 == index && slot.live < spec.generations;
            Ok(match decode(&page, table_len).filter(is_sound) {
                Some(slot) => Found::Whole(slot),
                None if page.iter().all(|&byte| byte == 0) => Found::Blank,
                None => Found::Torn(claim(&page).filter(|claim| claim.sequence % 2 == index)),
            })
        };
        Ok([found(0)?, found(1)?])
    }

    /// Where slot `index` lies in the file: offset and length.
    pub(super) fn slot_extent(&self, index: u64) -> (u64, u64) {
        (self.slots_at + index * self.slot_bytes as u64, self.slot_bytes as u64)
    }

    fn slot_page(&self, index: u64) -> Result<IoBuf, TierError> {
        let (at, _) = self.slot_extent(index);
        Ok(self.engine.submit(Request::read(self.file.id, at, IoBuf::zeroed(self.slot_bytes))).wait()?)
    }

    /// Closes and deletes the file: the store is no more.
    pub(super) fn remove(&self) -> Result<(), TierError> {
        self.file.close()?;
        Ok(self.engine.remove(&self.path)?)
    }

    /// Writes a slot to the place of its sequence number, over the older one in a commit, and makes it durable.
    pub(super) fn write(&self, slot: &Slot) -> Result<(), TierError> {
        assert!(slot.trainer.len() <= TRAINER_BYTES_MAX, "the trainer's words fit the slot");
        let page = encode(slot, self.slot_bytes);
        let (at, _) = self.slot_extent(slot.sequence % 2);
        self.engine.submit(Request::write(self.file.id, at, page)).wait()?;
        self.engine.sync(self.file.id).wait()?;
        Ok(())
    }
}

impl Found {
    pub(super) fn whole(self) -> Option<Slot> {
        match self {
            Self::Whole(slot) => Some(slot),
            Self::Blank | Self::Torn(_) => None,
        }
    }
}

fn claim(page: &[u8]) -> Option<Claim> {
    let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
    let is_slot = page.len() >= SLOT_HEADER && (page[0..8] == SLOT_MAGIC || page[0..8] == MARK_MAGIC);
    is_slot.then(|| Claim { sequence: word(8), step: word(16) })
}

pub(super) fn encode(slot: &Slot, slot_bytes: usize) -> IoBuf {
    let mut page = IoBuf::zeroed(slot_bytes);
    page[0..8].copy_from_slice(if slot.is_mark { &MARK_MAGIC } else { &SLOT_MAGIC });
    let words = [slot.sequence, slot.step, slot.live, slot.table.len() as u64, slot.trainer.len() as u64];
    let mut at = 8;
    for word in words.iter().chain(&slot.table) {
        page[at..at + 8].copy_from_slice(&word.to_le_bytes());
        at += 8;
    }
    page[at..at + slot.trainer.len()].copy_from_slice(&slot.trainer);
    at += slot.trainer.len();
    let sum = checksum(&page[..at]);
    page[at..at + 8].copy_from_slice(&sum.to_le_bytes());
    page
}

pub(super) fn decode(page: &[u8], table_len: usize) -> Option<Slot> {
    let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
    let magic = page.first_chunk::<8>().filter(|_| page.len() >= SLOT_HEADER)?;
    let is_mark = match *magic {
        SLOT_MAGIC => false,
        MARK_MAGIC => true,
        _ => return None,
    };
    if word(32) != table_len as u64 || word(40) > TRAINER_BYTES_MAX as u64 {
        return None;
    }
    let (table_at, trainer_len) = (SLOT_HEADER, word(40) as usize);
    let trainer_at = table_len.checked_mul(8)?.checked_add(table_at)?;
    let end = trainer_at.checked_add(trainer_len)?;
    if end > page.len().checked_sub(8)? || word(end) != checksum(&page[..end]) {
        return None;
    }
    Some(Slot {
        is_mark,
        sequence: word(8),
        step: word(16),
        live: word(24),
        table: (0..table_len).map(|i| word(table_at + i * 8)).collect(),
        trainer: page[trainer_at..end].to_vec(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_survives_encoding_and_no_flipped_bit_does() {
        for is_mark in [false, true] {
            let (table, trainer) = (vec![1, 2, 3], b"{}".to_vec());
            let slot = Slot { is_mark, sequence: 7, step: 6, live: 1, table, trainer };
            let mut page = encode(&slot, PAGE);
            assert_eq!(decode(&page, 3), Some(slot));
            assert_eq!(decode(&page, 4), None, "a table of another length belongs to another layout");
            let used = SLOT_HEADER + 3 * 8 + 2 + 8;
            for bit in 0..used * 8 {
                page[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(decode(&page, 3), None, "bit {bit}");
                page[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }
}
