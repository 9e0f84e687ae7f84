//! The manifest: which generation is live, and the checksum of every chunk in it.
//!
//! ```text
//! manifest.bin
//! | header page (4 KiB)                          | layout   | slot 0 | slot 1 | layout   | header page |
//! | magic 8 | version 4 | 0 4 | volume id 8 |    |          |        |        | once     | once        |
//! | layout bytes 8 | slot bytes 8 |              |          |        |        | more     | more        |
//! | checksum of the layout 8 |
//! | checksum of this header 8 |
//!
//! layout: the spec of the store (JSON), padded to 4 KiB
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
//! slot 1 is durable, and zeros beside a later slot are not what was written: a sector that was lost.
//!
//! What a slot held may be given up for the other. Its place then says so, of the sequence number that the next commit has:
//!
//! ```text
//! | magic 8 | sequence 8 | checksum 8 |
//! ```
//! Earlier builds gave a place up with zeros, and read this as a slot that is not whole.
//!
//! Slots are found by the header and read by the layout, so that both of these are there twice ([`crate::copies`]). Any of the
//! four may be damaged: the second header is the last page of the file, and a layout is known by its checksum. Version 2 had
//! only the first of each.
//!
//! Creation makes both layouts durable before it writes the headers, whose words lie in one sector, and both headers before the
//! first commit: a creation that was cut off leaves no header, or whole ones and layouts but blank slots. Either is replaced.

use crate::copies::{self, DamagedCopy, Mend};
use crate::file::OpenFile;
use crate::{StoreSpec, TierError, checksum};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use terrace_aio::{IoBuf, IoEngine, IoError, OpenMode, Request};

pub(super) const FILE_NAME: &str = "manifest.bin";
const PAGE: usize = 4096;
pub(super) const MAGIC: [u8; 8] = *b"TRCMANIF";
const SLOT_MAGIC: [u8; 8] = *b"TRCSLOT1";
const MARK_MAGIC: [u8; 8] = *b"TRCMARK1";
const GIVEN_UP_MAGIC: [u8; 8] = *b"TRCVOID1";
pub(super) const VERSION: u32 = 3;
/// The first version with two headers and layouts.
const TWICE_SINCE: u32 = 3;
const VERSION_MIN: u32 = 2;
const SLOT_HEADER: usize = 48;
/// Room for the trainer's own words in every slot.
pub const TRAINER_BYTES_MAX: usize = 16 << 10;

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
    /// What says that the place waits for the commit of this sequence number, and that nothing is missing before it.
    GivenUp(u64),
    /// No whole slot: damaged, or a commit that was cut off.
    Torn(Option<Claim>),
    /// What the drive cannot read.
    Unreadable,
    /// A slot as it was written, a commit or a mark.
    Whole(Slot),
}

/// What the header of a slot that is not whole says, which may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) sequence: u64,
    pub(super) step: u64,
}

/// A slot that is not whole, where the other is the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PassedOver {
    /// It was that of the newest commit; its header names this step.
    Newest { step: u64 },
    /// Nothing says whether it was newer or older.
    Either,
}

#[derive(Debug)]
pub(super) struct Manifest {
    engine: Arc<dyn IoEngine>,
    file: OpenFile,
    pub(super) path: PathBuf,
    pub(super) id: u64,
    pub(super) version: u32,
    slots_at: u64,
    slot_bytes: usize,
    /// Copies of the header and the layout that are damaged.
    mends: Vec<Mend>,
}

/// The header: where everything else is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Head {
    version: u32,
    id: u64,
    spec_bytes: u64,
    slot_bytes: u64,
    spec_sum: u64,
}

/// Where the parts of a manifest begin.
#[derive(Debug, Clone, Copy)]
struct Places {
    slots: u64,
    /// Of the second copies, if there are any.
    copies: Option<(u64, u64)>,
    end: u64,
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
        let head = Head {
            version: VERSION,
            id,
            spec_bytes: text.len() as u64,
            slot_bytes: slot_bytes as u64,
            spec_sum: checksum(&text),
        };
        let places = head.places().expect("the file is of a size that files can have");
        let (spec_copy, head_copy) = places.copies.expect("this version has copies");
        let file = OpenFile::open(engine, &path, OpenMode::CreateNew { len: places.end })?;
        for parts in [
            [(PAGE as u64, padded(&text)), (spec_copy, padded(&text))],
            [(0, head.page()), (head_copy, head.page())],
        ] {
            for (offset, page) in parts {
                engine.submit(Request::write(file.id, offset, page)).wait()?;
            }
            engine.sync(file.id).wait()?;
        }
        let (version, slots_at) = (VERSION, places.slots);
        let engine = Arc::clone(engine);
        Ok(Self { engine, file, path, id, version, slots_at, slot_bytes, mends: Vec::new() })
    }

    /// Opens a manifest and gives its spec.
    pub(super) fn open(
        engine: &Arc<dyn IoEngine>,
        dir: &Path,
        mode: OpenMode,
    ) -> Result<(Self, StoreSpec), TierError> {
        let path = dir.join(FILE_NAME);
        let file = match OpenFile::open(engine, &path, mode) {
            Ok(file) => file,
            Err(error) if crate::volume::is_missing(&error) => {
                return Err(TierError::NoState { path, detail: "there is no manifest".into() });
            }
            Err(error) => return Err(error.into()),
        };
        let mut manifest = Self {
            engine: Arc::clone(engine),
            file,
            path,
            id: 0,
            version: VERSION,
            slots_at: 0,
            slot_bytes: 0,
            mends: Vec::new(),
        };
        let (head, places) = manifest.find_head()?;
        manifest.version = head.version;
        manifest.id = head.id;
        // Less than the file's length, and slots are read whole.
        (manifest.slots_at, manifest.slot_bytes) = (places.slots, head.slot_bytes as usize);
        let text = manifest.find_spec(&head, &places)?;
        let spec = serde_json::from_slice(&text)
            .map_err(|e| manifest.no_layout(format!("the layout cannot be read: {e}")))?;
        Ok((manifest, spec))
    }

    /// The header, from a copy that is whole.
    fn find_head(&mut self) -> Result<(Head, Places), TierError> {
        let len = self.engine.len(self.file.id)?;
        let never_written = |path: &Path| {
            let detail = "its manifest was never written".into();
            Err(TierError::NoState { path: path.to_owned(), detail })
        };
        let is_blank = |page: &[u8]| page.iter().all(|&byte| byte == 0);
        // Shorter than any manifest: a file that is getting its space, or none of ours.
        if len < 2 * PAGE as u64 && self.file.is_blank()? {
            return never_written(&self.path);
        }
        if len < PAGE as u64 {
            return Err(self.foreign());
        }
        let first = self.read(0, PAGE)?;
        if let Some(head) = Head::of(&first) {
            let places = self.places(&head, len)?;
            if let Some((_, at)) = places.copies {
                let second = self.read(at, PAGE)?;
                if Head::of(&second) != Some(head) {
                    self.note("header", at, second, head.page());
                }
            }
            return Ok((head, places));
        }
        let last = (len - PAGE as u64) / PAGE as u64 * PAGE as u64;
        let second = self.read(last, PAGE)?;
        if let Some(head) = Head::of(&second) {
            let places = self.places(&head, len)?;
            if places.copies.is_some_and(|(_, at)| at == last) {
                self.note("header", 0, first, head.page());
                return Ok((head, places));
            }
        }
        // What the drive cannot read may be the copy that is whole.
        let (first, second) = (first?, second?);
        if is_blank(&first) && is_blank(&second) && len >= 2 * PAGE as u64 {
            return never_written(&self.path);
        }
        if first[..8] != MAGIC && second[..8] != MAGIC {
            return Err(self.foreign());
        }
        Err(self.no_layout("neither copy of the manifest's header is one of ours".into()))
    }

    fn places(&self, head: &Head, len: u64) -> Result<Places, TierError> {
        if !(VERSION_MIN..=VERSION).contains(&head.version) {
            return Err(self.no_layout(format!(
                "it has format version {}; this program reads versions {VERSION_MIN} and {VERSION}",
                head.version
            )));
        }
        let places = head.places().filter(|places| places.end <= len);
        places.ok_or_else(|| self.no_layout("the manifest was truncated".into()))
    }

    /// The text of the layout, from a copy that is whole.
    fn find_spec(&mut self, head: &Head, places: &Places) -> Result<Vec<u8>, TierError> {
        let spec_bytes = head.spec_bytes as usize;
        let offsets = [Some(PAGE as u64), places.copies.map(|(spec, _)| spec)];
        let mut found = Vec::new();
        for offset in offsets.into_iter().flatten() {
            found.push((offset, self.read(offset, spec_bytes.next_multiple_of(PAGE))?));
        }
        let is_whole = |read: &copies::Read| {
            read.as_ref().is_ok_and(|text| checksum(&text[..spec_bytes]) == head.spec_sum)
        };
        let text = found.iter().filter(|(_, read)| is_whole(read)).find_map(|(_, read)| read.as_ref().ok());
        let Some(text) = text.map(|text| text[..spec_bytes].to_vec()) else {
            for (_, read) in found {
                read?;
            }
            return Err(self.no_layout("the manifest's layout has a wrong checksum".into()));
        };
        for (offset, read) in found {
            if !is_whole(&read) {
                self.note("layout", offset, read, padded(&text));
            }
        }
        Ok(text)
    }

    fn read(&self, offset: u64, len: usize) -> Result<copies::Read, TierError> {
        copies::read(&self.engine, self.file.id, offset, len)
    }

    fn note(&mut self, what: &'static str, offset: u64, found: copies::Read, bytes: IoBuf) {
        let mend = Mend::new(what, (self.file.id, &self.path), offset, found, bytes);
        self.mends.push(mend);
    }

    fn foreign(&self) -> TierError {
        let detail = "is no manifest of training state, or has lost both copies of its header; if it is something else, move it away \
                      or choose another directory";
        TierError::Foreign { path: self.path.clone(), detail: detail.into() }
    }

    fn no_layout(&self, detail: String) -> TierError {
        TierError::NoLayout { path: self.path.clone(), detail }
    }

    /// Copies of the header and the layout that were damaged when the manifest was opened.
    pub(super) fn damaged_copies(&self) -> impl Iterator<Item = &DamagedCopy> {
        self.mends.iter().map(|mend| &mend.copy)
    }

    /// Writes them anew.
    pub(super) fn mend(&self) -> Result<(), TierError> {
        self.mends.iter().try_for_each(|mend| mend.write(&self.engine))
    }

    /// The newest valid slot, if any was ever committed, and what was passed over for it. The slot may be a mark. A slot that the drive
    /// cannot read is no reason to go on from the other: that may be an older one, over which a step has begun to write.
    pub(super) fn newest(&self, spec: &StoreSpec) -> Result<Option<(Slot, Option<PassedOver>)>, TierError> {
        let (found, unreadable) = self.slots(spec)?;
        // A torn first commit leaves slot 0 blank; anything in it means that there was a whole one.
        let is_later = |found: &Found| matches!(found, Found::Torn(Some(claim)) if claim.sequence > 1);
        let is_lost = found[0] != Found::Blank || is_later(&found[1]);
        let Some(newest) = newest_of(&found).cloned() else {
            if is_lost {
                return Err(self.neither_is_whole());
            }
            return Ok(None);
        };
        if let Some(cause) = unreadable {
            return Err(TierError::UnreadableSlot { cause, step: newest.step });
        }
        let passed_over = PassedOver::of(&found, &newest);
        Ok(Some((newest, passed_over)))
    }

    /// There were commits, and none can be trusted.
    pub(super) fn neither_is_whole(&self) -> TierError {
        self.no_layout("neither of the two slots of its manifest is whole".into())
    }

    /// What both places hold. One that the drive cannot read comes with what the drive said, if the other is whole; but of state that is
    /// kept once it may be the mark, and nothing is.
    pub(super) fn slots(&self, spec: &StoreSpec) -> Result<([Found; 2], Option<IoError>), TierError> {
        let table_len = spec.table_len();
        let found = |index: u64, page: &[u8]| {
            let is_sound = |slot: &Slot| slot.sequence % 2 == index && slot.live < spec.generations;
            match decode(page, table_len).filter(is_sound) {
                Some(slot) => Found::Whole(slot),
                None if page.iter().all(|&byte| byte == 0) => Found::Blank,
                None => match decode_given_up(page) {
                    Some(sequence) => Found::GivenUp(sequence),
                    None => Found::Torn(claim(page).filter(|claim| claim.sequence % 2 == index)),
                },
            }
        };
        let pages = [self.slot_page(0)?, self.slot_page(1)?];
        let both = [0, 1].map(|i| pages[i].as_ref().map_or(Found::Unreadable, |page| found(i as u64, page)));
        let both = lost_are_torn(both);
        match pages.into_iter().find_map(Result::err) {
            Some(error) if newest_of(&both).is_none() || spec.generations == 1 => Err(error.into()),
            unreadable => Ok((both, unreadable)),
        }
    }

    /// Where slot `index` lies in the file: offset and length.
    pub(super) fn slot_extent(&self, index: u64) -> (u64, u64) {
        (self.slots_at + index * self.slot_bytes as u64, self.slot_bytes as u64)
    }

    fn slot_page(&self, index: u64) -> Result<copies::Read, TierError> {
        let (at, _) = self.slot_extent(index);
        self.read(at, self.slot_bytes)
    }

    /// Closes and deletes the file: the store is no more.
    pub(super) fn remove(&self) -> Result<(), TierError> {
        self.file.close()?;
        Ok(self.engine.remove(&self.path)?)
    }

    /// Says in the place of a sequence number, which the next commit has, that what was there counts no more, and makes that durable.
    pub(super) fn give_up(&self, sequence: u64) -> Result<(), TierError> {
        self.put(sequence, encode_given_up(sequence, self.slot_bytes))
    }

    /// Writes a slot to the place of its sequence number, over the older one in a commit, and makes it durable.
    pub(super) fn write(&self, slot: &Slot) -> Result<(), TierError> {
        assert!(slot.trainer.len() <= TRAINER_BYTES_MAX, "the trainer's words fit the slot");
        self.put(slot.sequence, encode(slot, self.slot_bytes))
    }

    /// Writes the page of a sequence number's place and makes it durable.
    fn put(&self, sequence: u64, page: IoBuf) -> Result<(), TierError> {
        let (at, _) = self.slot_extent(sequence % 2);
        self.engine.submit(Request::write(self.file.id, at, page)).wait()?;
        self.engine.sync(self.file.id).wait()?;
        Ok(())
    }
}

/// Before anything is done that an end in the middle would leave uncertain.
pub(super) fn require_short(trainer: &[u8]) -> Result<(), TierError> {
    if trainer.len() <= TRAINER_BYTES_MAX {
        return Ok(());
    }
    let detail = format!("has {} bytes; a commit has room for {TRAINER_BYTES_MAX}", trainer.len());
    Err(TierError::Invalid { what: "the trainer's note", detail })
}

impl Head {
    /// The header that a page is.
    fn of(read: &copies::Read) -> Option<Self> {
        let page = read.as_ref().ok()?;
        let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
        let is_ours = page[0..8] == MAGIC && word(48) == checksum(&page[..48]);
        is_ours.then(|| Self {
            version: u32::from_le_bytes(page[8..12].try_into().expect("four bytes")),
            id: word(16),
            spec_bytes: word(24),
            slot_bytes: word(32),
            spec_sum: word(40),
        })
    }

    fn page(&self) -> IoBuf {
        let mut page = IoBuf::zeroed(PAGE);
        page[0..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&self.version.to_le_bytes());
        for (at, value) in [(16, self.id), (24, self.spec_bytes), (32, self.slot_bytes), (40, self.spec_sum)]
        {
            page[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        let sum = checksum(&page[..48]);
        page[48..56].copy_from_slice(&sum.to_le_bytes());
        page
    }

    /// `None` if no file is so large.
    fn places(&self) -> Option<Places> {
        let spec = self.spec_bytes.checked_next_multiple_of(PAGE as u64)?;
        let slots = spec.checked_add(PAGE as u64)?;
        let after = self.slot_bytes.checked_mul(2)?.checked_add(slots)?;
        if self.version < TWICE_SINCE {
            return Some(Places { slots, copies: None, end: after });
        }
        let head_copy = after.checked_add(spec)?;
        let end = head_copy.checked_add(PAGE as u64)?;
        Some(Places { slots, copies: Some((after, head_copy)), end })
    }
}

/// `text` in whole pages.
fn padded(text: &[u8]) -> IoBuf {
    let mut page = IoBuf::zeroed(text.len().next_multiple_of(PAGE));
    page[..text.len()].copy_from_slice(text);
    page
}

/// The whole slot with the highest sequence number.
pub(super) fn newest_of(found: &[Found; 2]) -> Option<&Slot> {
    let whole = found.iter().filter_map(|found| match found {
        Found::Whole(slot) => Some(slot),
        Found::Blank | Found::GivenUp(_) | Found::Torn(_) | Found::Unreadable => None,
    });
    whole.max_by_key(|slot| slot.sequence)
}

/// What is empty beside a whole slot, torn if it should not be: the first commit alone has nothing beside it, and a place is given up
/// for the number that follows.
fn lost_are_torn(mut found: [Found; 2]) -> [Found; 2] {
    let Some(newest) = newest_of(&found).map(|slot| slot.sequence) else { return found };
    for place in &mut found {
        let is_lost = match place {
            Found::Blank => newest > 1,
            Found::GivenUp(sequence) => newest.checked_add(1) != Some(*sequence),
            Found::Torn(_) | Found::Unreadable | Found::Whole(_) => false,
        };
        if is_lost {
            *place = Found::Torn(None);
        }
    }
    found
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

fn encode_given_up(sequence: u64, slot_bytes: usize) -> IoBuf {
    let mut page = IoBuf::zeroed(slot_bytes);
    page[0..8].copy_from_slice(&GIVEN_UP_MAGIC);
    page[8..16].copy_from_slice(&sequence.to_le_bytes());
    let sum = checksum(&page[..16]);
    page[16..24].copy_from_slice(&sum.to_le_bytes());
    page
}

/// The sequence number that a place was given up for.
fn decode_given_up(page: &[u8]) -> Option<u64> {
    let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().expect("eight bytes"));
    let is_whole = page.len() >= 24 && page[0..8] == GIVEN_UP_MAGIC && word(16) == checksum(&page[..16]);
    is_whole.then(|| word(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_empty_beside_a_slot_is_damage_but_for_what_is_known_of() {
        let whole = |sequence| {
            let (table, trainer) = (Vec::new(), Vec::new());
            Found::Whole(Slot { is_mark: false, sequence, step: 0, live: 0, table, trainer })
        };
        for first_is_whole in [true, false] {
            for (sequence, place, is_lost) in [
                (1, Found::Blank, false),
                (2, Found::Blank, true),
                (9, Found::Blank, true),
                (9, Found::GivenUp(10), false),
                (9, Found::GivenUp(8), true),
                (9, Found::GivenUp(12), true),
            ] {
                let mut both = [whole(sequence), place.clone()];
                let mut expected = both.clone();
                if is_lost {
                    expected[1] = Found::Torn(None);
                }
                if !first_is_whole {
                    both.reverse();
                    expected.reverse();
                }
                assert_eq!(lost_are_torn(both), expected, "{sequence}, {place:?}");
            }
        }
        assert_eq!(lost_are_torn([Found::Blank, Found::Torn(None)]), [Found::Blank, Found::Torn(None)]);
    }

    #[test]
    fn no_flipped_bit_gives_a_place_up() {
        let mut page = encode_given_up(12, PAGE);
        assert_eq!((decode_given_up(&page), decode(&page, 0)), (Some(12), None));
        for bit in 0..24 * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_given_up(&page), None, "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

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
