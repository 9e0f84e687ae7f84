//! Writing the next generation, and what waits for that.

use super::{Committed, DiskStore, Extents, Generation, Slot, TierError, Versions};
use crate::pool::Lease;
use crate::{BlobKey, Sealed};
use std::collections::VecDeque;
use std::sync::{MutexGuard, PoisonError};
use terrace_aio::{OpKind, Ticket, Urgency};

impl DiskStore {
    /// Starts writing one chunk of the next generation. The lease goes back to its pool when the write is done. The first one
    /// after a commit of the only generation waits for the mark, one of a chunk that was written since the last commit for that write.
    /// One thread at a time writes a chunk.
    ///
    /// # Errors
    /// An earlier write of the same blob, or an earlier commit, failed, or the mark cannot be made.
    ///
    /// # Panics
    /// If the group has no such chunk, the store no such kind, or the lease is not exactly as long as the chunk.
    pub fn write(&self, key: BlobKey, chunk: usize, lease: Lease) -> Result<(), TierError> {
        self.write_sealed(key, chunk, Sealed::new(lease))
    }

    /// As [`write`](Self::write) of a chunk whose checksum is known, so that a caller can sum several at once.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Panics
    /// As [`write`](Self::write).
    pub fn write_sealed(&self, key: BlobKey, chunk: usize, sealed: Sealed) -> Result<(), TierError> {
        self.write_sealed_as(Urgency::Whenever, key, chunk, sealed)
    }

    /// As [`write_sealed`](Self::write_sealed), with an urgency: that of the read that will wait for it.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    ///
    /// # Panics
    /// As [`write`](Self::write).
    pub fn write_sealed_as(
        &self,
        urgency: Urgency,
        key: BlobKey,
        chunk: usize,
        sealed: Sealed,
    ) -> Result<(), TierError> {
        let Sealed { lease, sum } = sealed;
        let Extents { spec, volume, .. } = &self.extents;
        let len = spec.chunk_bytes(key, chunk);
        assert_eq!(lease.len(), len, "the lease is as long as chunk {chunk} of {key:?}");
        let entry = self.extents.entry(key, chunk);
        let address = {
            let mut versions = self.when_not_held(self.written_before(key, chunk, entry)?);
            self.require_certain(&versions)?;
            self.mark(&mut versions)?;
            self.extents.address(key, chunk, self.generation_index(&versions, Generation::Next))
        };
        let request = volume.request(OpKind::Write, address, lease.into_io()).with_urgency(urgency);
        let ticket = volume.engine.submit(request).without_buffer();
        let mut versions = self.lock();
        let next = &mut versions.next;
        next.table[entry] = sum;
        next.written[entry] = true;
        let fence = next.fences.entry(key).or_default();
        // What is done need not be remembered; that it failed, must.
        let done =
            if fence.front().is_some_and(|(_, ticket)| ticket.is_done()) { fence.pop_front() } else { None };
        fence.push_back((chunk, ticket));
        let share = || spec.volume_bytes() / (spec.generations * spec.groups.len().max(1) as u64);
        let is_due = self.experience.pays(self.sync_ahead) && next.ahead.is_due(len as u64, share());
        let ahead = if is_due { next.ahead.begin(volume.begin_sync()) } else { Ok(()) };
        match done.map_or(Ok(()), |(_, done)| done.wait().map(drop)).and(ahead) {
            Ok(()) => Ok(()),
            Err(error) => Err(next.fail(error)),
        }
    }

    /// Hazard (write beside who reads what is held): with one generation, waits before the first write after a commit.
    fn when_not_held<'v>(&self, versions: MutexGuard<'v, Versions>) -> MutexGuard<'v, Versions> {
        let one = self.extents.spec.generations == 1;
        let held = |versions: &mut Versions| one && !versions.is_changing && versions.held > 0;
        self.released.wait_while(versions, held).unwrap_or_else(PoisonError::into_inner)
    }

    /// Hazard (write before the mark): with one generation, makes durable that the last commit is about to be overwritten.
    fn mark(&self, versions: &mut Versions) -> Result<(), TierError> {
        let is_first = versions.sequence > 0 && !versions.is_changing;
        if self.extents.spec.generations > 1 || !is_first {
            return Ok(());
        }
        let Committed { step, trainer } = versions.committed.clone();
        let (sequence, live, table) = (versions.sequence + 1, versions.live, versions.live_table.clone());
        // Whether a mark is there that could not be made is not known.
        versions.is_uncertain = true;
        // Under the lock: nobody writes before it is there.
        let marked = self.manifest.write(&Slot { is_mark: true, sequence, step, live, table, trainer });
        if let Err(error) = marked {
            // Nothing was overwritten, so the last commit is not to be refused for a mark that is there in spite of the error.
            versions.is_uncertain = self.manifest.give_up(sequence).is_err();
            return Err(error);
        }
        (versions.is_uncertain, versions.is_changing, versions.sequence) = (false, true, sequence);
        Ok(())
    }

    /// Waits for the writes of a blob.
    pub(super) fn fenced(&self, key: BlobKey) -> Result<MutexGuard<'_, Versions>, TierError> {
        let mut versions = self.lock();
        while let Some((chunk, ticket)) = versions.next.fences.get_mut(&key).and_then(VecDeque::pop_front) {
            versions = self.claim(versions, (key, chunk), ticket)?;
        }
        Ok(versions)
    }

    /// Hazard (write beside write): waits for the write of a chunk since the last commit, if there was one.
    fn written_before(
        &self,
        key: BlobKey,
        chunk: usize,
        entry: usize,
    ) -> Result<MutexGuard<'_, Versions>, TierError> {
        let mut versions = self.lock();
        if !versions.next.written[entry] {
            return Ok(versions);
        }
        let fence = versions.next.fences.get_mut(&key);
        let earlier = fence.and_then(|fence| fence.remove(fence.iter().position(|(of, _)| *of == chunk)?));
        if let Some((_, ticket)) = earlier {
            versions = self.claim(versions, (key, chunk), ticket)?;
        }
        // Or somebody else waits for it.
        let is_claimed = |versions: &mut Versions| versions.claimed.contains(&(key, chunk));
        Ok(self.released.wait_while(versions, is_claimed).unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for a ticket that was in a fence, with the lock free.
    fn claim<'v>(
        &'v self,
        mut versions: MutexGuard<'v, Versions>,
        of: (BlobKey, usize),
        ticket: Ticket,
    ) -> Result<MutexGuard<'v, Versions>, TierError> {
        versions.claimed.push(of);
        drop(versions);
        let result = ticket.wait();
        versions = self.lock();
        let at = versions.claimed.iter().position(|claimed| *claimed == of);
        versions.claimed.swap_remove(at.expect("what was claimed is there"));
        self.released.notify_all();
        match result {
            Ok(_) => Ok(versions),
            Err(error) => Err(versions.next.fail(error)),
        }
    }
}
