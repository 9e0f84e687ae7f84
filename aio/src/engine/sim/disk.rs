//! What a simulated disk holds: what reads see, what is durable, and what a power cut leaves of the difference.
//!
//! Each file keeps, for every sector written since the last sync, all versions that the sector has had. A power cut
//! chooses one of them, or the durable one, for each sector by itself: drives promise no order between sectors and
//! no more than one whole sector at a time.

use crate::random::Random;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes that survive a power cut together.
pub(super) const SECTOR: usize = 512;

/// All files by path.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk {
    files: BTreeMap<PathBuf, SimFile>,
}

/// One file.
#[derive(Debug, Clone, Default)]
pub(super) struct SimFile {
    current: Vec<u8>,
    durable: Vec<u8>,
    unsynced: BTreeMap<usize, Vec<Version>>,
    /// Requests that made the file longer since the last sync, with the length they made.
    growth: Vec<(u64, usize)>,
    bad: Vec<Range<u64>>,
}

/// A sector as one request left it.
#[derive(Debug, Clone)]
struct Version {
    request: u64,
    bytes: Box<[u8; SECTOR]>,
}

impl Disk {
    pub fn file(&self, path: &Path) -> Option<&SimFile> {
        self.files.get(path)
    }

    pub fn file_mut(&mut self, path: &Path) -> Option<&mut SimFile> {
        self.files.get_mut(path)
    }

    pub fn create(&mut self, path: &Path, len: usize) {
        let file = SimFile { current: vec![0; len], durable: vec![0; len], ..SimFile::default() };
        self.files.insert(path.to_owned(), file);
    }

    pub fn remove(&mut self, path: &Path) -> bool {
        self.files.remove(path).is_some()
    }

    pub fn paths(&self) -> Vec<PathBuf> {
        self.files.keys().cloned().collect()
    }

    pub fn used_bytes(&self) -> u64 {
        self.files.values().map(|file| file.current.len() as u64).sum()
    }

    pub fn break_range(&mut self, path: &Path, range: Range<u64>) {
        if let Some(file) = self.files.get_mut(path) {
            file.bad.push(range);
        }
    }

    pub fn corrupt(&mut self, path: &Path, offset: u64, bytes: &[u8]) {
        let file = self.files.get_mut(path).expect("the file to corrupt exists");
        let start = usize::try_from(offset).expect("the simulated disk is in memory");
        for image in [&mut file.current, &mut file.durable] {
            image[start..start + bytes.len()].copy_from_slice(bytes);
        }
        let (first, last) = (start / SECTOR, (start + bytes.len()).div_ceil(SECTOR));
        file.unsynced.retain(|sector, _| !(first..last).contains(sector));
    }

    /// The disk as it comes up after a power cut.
    pub fn after_crash(&self, random: &mut Random) -> Self {
        // Some cuts lose nothing or everything, which independent choices would almost never do.
        let survivors_of_8 = [0, 8, random.below(9)][random.below(3) as usize];
        let files =
            self.files.iter().map(|(path, file)| (path.clone(), file.after_crash(survivors_of_8, random)));
        Self { files: files.collect() }
    }
}

impl SimFile {
    pub fn current(&self) -> &[u8] {
        &self.current
    }

    pub fn is_bad(&self, range: &Range<u64>) -> bool {
        self.bad.iter().any(|bad| bad.start < range.end && range.start < bad.end)
    }

    /// Reads up to `into.len()` bytes, fewer at the end of the file.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> usize {
        let available = self.current.get(offset..).unwrap_or_default();
        let count = available.len().min(into.len());
        into[..count].copy_from_slice(&available[..count]);
        count
    }

    /// Writes into the cache, making the file longer where needed.
    pub fn write(&mut self, request: u64, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        if end > self.current.len() {
            self.current.resize(end, 0);
            self.growth.push((request, end));
        }
        self.current[offset..end].copy_from_slice(bytes);
        for sector in offset / SECTOR..end.div_ceil(SECTOR) {
            let bytes = sector_of(&self.current, sector);
            self.unsynced.entry(sector).or_default().push(Version { request, bytes });
        }
    }

    /// Makes durable what `is_covered` requests wrote; later versions stay in the cache.
    pub fn sync(&mut self, is_covered: impl Fn(u64) -> bool) {
        let durable_len = self.growth.iter().filter(|(request, _)| is_covered(*request)).map(|(_, len)| *len);
        let durable_len = durable_len.max().unwrap_or(0).max(self.durable.len());
        self.durable.resize(durable_len, 0);
        self.growth.retain(|(request, _)| !is_covered(*request));
        let durable = &mut self.durable;
        self.unsynced.retain(|&sector, versions| {
            if let Some(last) = versions.iter().rposition(|version| is_covered(version.request)) {
                put_sector(durable, sector, &versions[last].bytes);
                versions.drain(..=last);
            }
            !versions.is_empty()
        });
    }

    fn after_crash(&self, survivors_of_8: u64, random: &mut Random) -> Self {
        let mut image = self.durable.clone();
        let grown = self.current.len() - self.durable.len();
        if grown > 0 && random.below(8) < survivors_of_8 {
            // The length reached the disk, perhaps only that of an earlier moment.
            let len = if random.one_in(2) { grown } else { random.below(grown as u64 + 1) as usize };
            image.resize(self.durable.len() + len, 0);
        }
        for (&sector, versions) in &self.unsynced {
            if random.below(8) < survivors_of_8 {
                // Mostly the last version, sometimes one that was overwritten in the cache later.
                let last = versions.len() - 1;
                let index =
                    if random.one_in(4) { random.below(versions.len() as u64) as usize } else { last };
                put_sector(&mut image, sector, &versions[index].bytes);
            }
        }
        Self { current: image.clone(), durable: image, bad: self.bad.clone(), ..Self::default() }
    }
}

/// A sector's bytes, zeros after the end.
fn sector_of(image: &[u8], sector: usize) -> Box<[u8; SECTOR]> {
    let mut bytes = Box::new([0; SECTOR]);
    let start = sector * SECTOR;
    let end = image.len().min(start + SECTOR);
    bytes[..end - start].copy_from_slice(&image[start..end]);
    bytes
}

/// Overwrites the part of a sector that lies inside the image.
fn put_sector(image: &mut [u8], sector: usize, bytes: &[u8; SECTOR]) {
    let start = sector * SECTOR;
    if start < image.len() {
        let end = image.len().min(start + SECTOR);
        image[start..end].copy_from_slice(&bytes[..end - start]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crashed(file: &SimFile, survivors_of_8: u64, seed: u64) -> SimFile {
        file.after_crash(survivors_of_8, &mut Random::new(seed))
    }

    #[test]
    fn synced_bytes_survive_and_unsynced_bytes_need_not() {
        let mut file = SimFile { current: vec![0; 2048], durable: vec![0; 2048], ..SimFile::default() };
        file.write(1, 0, &[1; 1024]);
        file.sync(|_| true);
        file.write(2, 512, &[2; 1024]);
        let lost = crashed(&file, 0, 1);
        assert_eq!(lost.current, [[1u8; 1024], [0u8; 1024]].concat());
        let whole = crashed(&file, 8, 3);
        assert_eq!(whole.current, file.current);
    }

    #[test]
    fn a_write_is_torn_at_sectors() {
        let mut file = SimFile { current: vec![0; 8192], durable: vec![0; 8192], ..SimFile::default() };
        file.write(1, 0, &[1; 8192]);
        let torn = crashed(&file, 4, 5).current;
        let sectors: Vec<u8> = torn.chunks(SECTOR).map(|s| s[0]).collect();
        assert!(torn.chunks(SECTOR).all(|s| s.iter().all(|&byte| byte == s[0])));
        assert!(sectors.contains(&0) && sectors.contains(&1));
    }

    #[test]
    fn a_sync_covers_only_what_it_may() {
        let mut file = SimFile { current: vec![0; 1024], durable: vec![0; 1024], ..SimFile::default() };
        file.write(1, 0, &[1; 512]);
        file.write(2, 512, &[2; 1024]);
        file.sync(|request| request == 1);
        let after = crashed(&file, 0, 1);
        assert_eq!(after.current, [[1u8; 512], [0u8; 512]].concat());
        file.sync(|_| true);
        assert_eq!(crashed(&file, 0, 1).current, file.current);
    }
}
