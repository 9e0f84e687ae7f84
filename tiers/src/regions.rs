//! Disk space of which parts are written and read: keys and values, which grow by a few positions at a time.
//!
//! A region has the length of the buffer that holds it in memory, and a request moves blocks of [`REGION_BLOCK`] bytes between the
//! same places of both. Every block has a checksum, kept in memory, so that parts which were written at different times are read
//! together and verified. Like a [`Scratch`](crate::Scratch), it does not outlive the process. Reads are urgent, as those of weights are: both
//! are for the block that is computed next.

use crate::pool::Lease;
use crate::volume::Volume;
use crate::{Striping, TierError, checksum};
use std::ops::Range;
use std::sync::Arc;
use terrace_aio::{FileId, IoEngine, OpKind, Ticket, Urgency};

/// Bytes of a block: what is moved and verified as one.
pub const REGION_BLOCK: usize = 4096;

/// A scratch volume with equal regions.
#[derive(Debug)]
pub struct Regions {
    volume: Volume,
    regions: Vec<Region>,
    region_bytes: usize,
}

#[derive(Debug)]
struct Region {
    /// Of every block; 0 where none was written.
    sums: Vec<u64>,
    /// Hazard (read before written): blocks may only be read after the last write is done.
    writing: Option<Ticket>,
}

/// Blocks of a region on their way into a buffer.
#[derive(Debug)]
#[must_use = "the bytes are only trusted after `Regions::arrive`"]
pub struct PendingBlocks {
    region: usize,
    blocks: Vec<Range<usize>>,
    memory: Memory,
}

#[derive(Debug)]
enum Memory {
    Coming(Ticket),
    /// There was nothing to read.
    Here(Lease),
}

impl Regions {
    /// Bytes that a volume of `count` regions of `region_bytes` needs in each directory.
    pub fn bytes_per_dir(striping: &Striping, count: usize, region_bytes: usize) -> Vec<u64> {
        Volume::file_bytes((whole(region_bytes) * count) as u64, striping)
    }

    /// Bytes of host memory that the checksums of so many regions take.
    pub fn table_bytes(count: usize, region_bytes: usize) -> u64 {
        (count * (whole(region_bytes) / REGION_BLOCK) * size_of::<u64>()) as u64
    }

    /// Makes a volume `name` of `count` regions of `region_bytes`, rounded up to whole blocks.
    ///
    /// The directories belong to the caller: no lock is taken here.
    ///
    /// # Errors
    /// The directories have too little room or cannot be written.
    pub fn create(
        engine: &Arc<dyn IoEngine>,
        striping: &Striping,
        name: &str,
        count: usize,
        region_bytes: usize,
    ) -> Result<Self, TierError> {
        let region_bytes = whole(region_bytes);
        let volume = Volume::create_scratch(engine, striping, name, (region_bytes * count) as u64);
        let volume = volume.map_err(|error| {
            let smaller = "add another directory to EngineConfig::disks, or lower BatchLimits::sequences or BatchLimits::cache_length";
            error.too_small_for("the key/value cache", smaller)
        })?;
        let blocks = region_bytes / REGION_BLOCK;
        let regions = (0..count).map(|_| Region { sums: vec![0; blocks], writing: None }).collect();
        Ok(Self { volume, regions, region_bytes })
    }

    /// Bytes of a region, and of the buffers that are read and written.
    pub fn region_bytes(&self) -> usize {
        self.region_bytes
    }

    /// The region that is at `offset` of a file; `None` if that is none of this volume's.
    pub fn region_at(&self, file: FileId, offset: u64) -> Option<usize> {
        let address = self.volume.address(file, offset)?;
        Some((address / self.region_bytes as u64) as usize)
    }

    /// Starts writing the blocks that `parts` of a buffer lie in; they may touch and overlap. The buffer goes back to its pool when
    /// that is done. The bytes around a part are written too, so that whoever wrote them before has [read](Self::read) them into
    /// the buffer.
    ///
    /// # Errors
    /// The region's previous write failed.
    ///
    /// # Panics
    /// If the buffer is not as long as a region.
    pub fn write(&mut self, region: usize, lease: Lease, parts: &[Range<usize>]) -> Result<(), TierError> {
        assert_eq!(lease.len(), self.region_bytes, "a buffer holds a region");
        self.wait_write(region)?;
        let blocks = blocks_of(parts);
        if blocks.is_empty() {
            return Ok(());
        }
        let Region { sums, writing } = &mut self.regions[region];
        for block in blocks.iter().cloned().flatten() {
            sums[block] = sum_of(&lease, block);
        }
        let address = (region * self.region_bytes) as u64;
        let bytes: Vec<Range<usize>> = blocks.iter().map(bytes_of).collect();
        let request = self.volume.request_parts(OpKind::Write, address, lease.into_io(), &bytes);
        *writing = Some(self.volume.engine.submit(request).without_buffer());
        Ok(())
    }

    /// Starts reading into a buffer what was written of the blocks that `needed` lies in, and of those that a write of `changed`
    /// would only change a part of. Waits for the region's write first.
    ///
    /// # Errors
    /// The region's write failed.
    ///
    /// # Panics
    /// If the buffer is not as long as a region.
    pub fn read(
        &mut self,
        region: usize,
        lease: Lease,
        needed: &[Range<usize>],
        changed: &[Range<usize>],
    ) -> Result<PendingBlocks, TierError> {
        assert_eq!(lease.len(), self.region_bytes, "a buffer holds a region");
        self.wait_write(region)?;
        let sums = &self.regions[region].sums;
        let edges = changed.iter().filter(|part| !part.is_empty()).flat_map(|part| {
            [part.start, part.end]
                .map(|at| (at / REGION_BLOCK * REGION_BLOCK)..at)
                .into_iter()
                .filter(|edge| !edge.is_empty())
        });
        let wanted: Vec<Range<usize>> = needed.iter().cloned().chain(edges).collect();
        let written = blocks_of(&wanted).into_iter().flatten().filter(|&block| sums[block] != 0);
        let blocks = joined(written.map(|block| block..block + 1));
        if blocks.is_empty() {
            return Ok(PendingBlocks { region, blocks, memory: Memory::Here(lease) });
        }
        let address = (region * self.region_bytes) as u64;
        let bytes: Vec<Range<usize>> = blocks.iter().map(bytes_of).collect();
        let request = self.volume.request_parts(OpKind::Read, address, lease.into_io(), &bytes);
        let request = request.with_urgency(Urgency::Soon);
        let memory = Memory::Coming(self.volume.engine.submit(request));
        Ok(PendingBlocks { region, blocks, memory })
    }

    /// Waits for the bytes of a read and verifies the checksum of every block. What was never written is not touched.
    ///
    /// # Errors
    /// The transfer failed, or the bytes are not those that were written.
    pub fn arrive(&self, pending: PendingBlocks) -> Result<Lease, TierError> {
        let PendingBlocks { region, blocks, memory } = pending;
        let lease = match memory {
            Memory::Here(lease) => return Ok(lease),
            Memory::Coming(ticket) => Lease::from_io(ticket.wait()?),
        };
        for block in blocks.into_iter().flatten() {
            let (found, sum) = (sum_of(&lease, block), self.regions[region].sums[block]);
            if found != sum {
                let address = (region * self.region_bytes + block * REGION_BLOCK) as u64;
                let (file, offset) = self.volume.locate(address);
                let detail = format!(
                    "scratch, region {region}, {REGION_BLOCK} bytes at offset {offset}: checksum {found:016x} instead of {sum:016x}; \
                     the drive returned other bytes than were written"
                );
                return Err(TierError::Damaged { path: self.volume.paths[file].clone(), detail });
            }
        }
        Ok(lease)
    }

    /// Waits for every write.
    ///
    /// # Errors
    /// The first write that failed.
    pub fn wait_writes(&mut self) -> Result<(), TierError> {
        let mut first = Ok(());
        for region in 0..self.regions.len() {
            first = first.and(self.wait_write(region));
        }
        first
    }

    /// Waits for the last write of a region.
    ///
    /// # Errors
    /// It failed.
    pub fn wait_write(&mut self, region: usize) -> Result<(), TierError> {
        if let Some(ticket) = self.regions[region].writing.take() {
            ticket.wait()?;
        }
        Ok(())
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        // Scratch files hold nothing worth keeping; one that cannot be removed is overwritten by the next run.
        let _ = self.wait_writes();
        let _ = self.volume.remove();
    }
}

fn whole(region_bytes: usize) -> usize {
    region_bytes.next_multiple_of(REGION_BLOCK)
}

fn bytes_of(blocks: &Range<usize>) -> Range<usize> {
    blocks.start * REGION_BLOCK..blocks.end * REGION_BLOCK
}

/// Of block `block` of a buffer; never 0.
fn sum_of(bytes: &[u8], block: usize) -> u64 {
    checksum(&bytes[block * REGION_BLOCK..][..REGION_BLOCK]).max(1)
}

/// The runs of blocks that parts lie in, in order and apart from each other.
fn blocks_of(parts: &[Range<usize>]) -> Vec<Range<usize>> {
    let some = parts.iter().filter(|part| !part.is_empty());
    joined(some.map(|part| part.start / REGION_BLOCK..part.end.div_ceil(REGION_BLOCK)))
}

/// Ranges in order and apart from each other: those that touch or overlap are one.
pub fn joined(ranges: impl Iterator<Item = Range<usize>>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = ranges.collect();
    runs.sort_unstable_by_key(|run| run.start);
    runs.dedup_by(|next, run| {
        let touches = next.start <= run.end;
        if touches {
            run.end = run.end.max(next.end);
        }
        touches
    });
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;
    use std::slice::from_ref;
    use terrace_aio::engine::{SimConfig, SimEngine};

    const BLOCKS: usize = 600;

    fn regions(config: SimConfig) -> Regions {
        let engine: Arc<dyn IoEngine> = Arc::new(SimEngine::new(config));
        let dirs = ["/a", "/b"].map(PathBuf::from);
        let striping = Striping::weighted(&dirs, &[2.0, 1.0]).unwrap();
        Regions::create(&engine, &striping, "regions.bin", 2, BLOCKS * REGION_BLOCK - 5).unwrap()
    }

    fn lease(regions: &Regions, fill: u8) -> Lease {
        let mut lease = Lease::standalone(regions.region_bytes());
        lease.fill(fill);
        lease
    }

    #[test]
    fn runs_of_blocks() {
        let b = REGION_BLOCK;
        let runs = |parts: &[Range<usize>]| blocks_of(parts);
        assert_eq!(runs(&[]), Vec::<Range<usize>>::new());
        assert_eq!(runs(&[5..5, 9 * b..9 * b]), Vec::<Range<usize>>::new());
        assert_eq!(runs(&[1..2, 3..3]), vec![0..1; 1]);
        assert_eq!(runs(&[b - 1..b + 1, 7 * b..8 * b, 3 * b..7 * b]), [0..2, 3..8]);
        assert_eq!(runs(&[0..10 * b, b..2 * b, 11 * b..11 * b + 1]), [0..10, 11..12]);
    }

    /// Against a copy in memory: parts of every length and place, of which edges share blocks.
    #[test]
    fn parts_come_back_as_they_were_written_last() {
        let mut regions = regions(SimConfig { seed: 3, ..SimConfig::default() });
        let bytes = regions.region_bytes();
        let mut truth = vec![vec![None; bytes]; 2];
        let mut random = 1_u64;
        let mut below = |n: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) as usize % n
        };
        for round in 0..60 {
            let region = below(2);
            let mut parts: Vec<Range<usize>> = (0..1 + below(4))
                .map(|_| {
                    let start = below(bytes);
                    start..(start + below(5 * REGION_BLOCK)).min(bytes)
                })
                .collect();
            parts.sort_by_key(|part| part.start);
            let needed = below(bytes / 2)..bytes / 2;
            let blank = lease(&regions, 0xee);
            let pending = regions.read(region, blank, from_ref(&needed), &parts).unwrap();
            let mut buffer = regions.arrive(pending).unwrap();
            for at in needed {
                assert!(truth[region][at].is_none_or(|byte| byte == buffer[at]), "round {round}, byte {at}");
            }
            for part in &parts {
                for at in part.clone() {
                    buffer[at] = (at % 251) as u8 ^ round;
                    truth[region][at] = Some(buffer[at]);
                }
            }
            regions.write(region, buffer, &parts).unwrap();
        }
        for (region, truth) in truth.iter().enumerate() {
            let blank = lease(&regions, 0xee);
            let whole = 0..bytes;
            let pending = regions.read(region, blank, &[whole], &[]).unwrap();
            let buffer = regions.arrive(pending).unwrap();
            let wrong = (0..bytes).find(|&at| truth[at].is_some_and(|byte| byte != buffer[at]));
            assert_eq!(wrong, None, "region {region}");
        }
    }

    #[test]
    fn every_block_is_found_by_its_place() {
        let regions = regions(SimConfig::default());
        let mut first = None;
        for region in 0..2 {
            for block in 0..BLOCKS {
                let at = (region * regions.region_bytes() + block * REGION_BLOCK) as u64;
                let buf = terrace_aio::IoBuf::zeroed(REGION_BLOCK);
                let request = regions.volume.request(OpKind::Read, at, buf);
                let segment = &request.segments[0];
                assert_eq!(regions.region_at(segment.file, segment.offset), Some(region), "block {block}");
                first.get_or_insert(segment.file);
            }
        }
        let first = first.expect("there are blocks");
        assert_eq!(regions.region_at(first, 0), None, "the header");
        assert_eq!(regions.region_at(first, 1 << 30), None, "behind the end");
        let unknown = FileId(u32::MAX);
        assert_eq!(regions.region_at(unknown, 1 << 20), None);
    }

    #[test]
    fn what_was_never_written_is_not_read() {
        let mut regions = regions(SimConfig::default());
        let filled = lease(&regions, 7);
        let first = 0..10;
        regions.write(0, filled, &[first]).unwrap();
        let blank = lease(&regions, 9);
        let all = 0..regions.region_bytes();
        let pending = regions.read(0, blank, &[all], &[]).unwrap();
        let buffer = regions.arrive(pending).unwrap();
        assert!(buffer[..REGION_BLOCK].iter().all(|&byte| byte == 7), "a whole block was written");
        assert!(buffer[REGION_BLOCK..].iter().all(|&byte| byte == 9));
    }

    #[test]
    fn other_bytes_than_were_written_are_found() {
        let mut regions = regions(SimConfig::default());
        let filled = lease(&regions, 7);
        let part = 3 * REGION_BLOCK..5 * REGION_BLOCK;
        regions.write(1, filled, from_ref(&part)).unwrap();
        regions.wait_writes().unwrap();
        let sum = &mut regions.regions[1].sums[4];
        *sum ^= 2;
        let blank = lease(&regions, 0);
        let pending = regions.read(1, blank, &[part], &[]).unwrap();
        let words = regions.arrive(pending).unwrap_err().to_string();
        assert!(words.contains("regions.bin") && words.contains("region 1"), "{words}");
        assert!(words.contains("other bytes than were written"), "{words}");
    }
}
