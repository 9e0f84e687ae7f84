//! Groups of which parts on demand come later (`on_demand.rs`): to host memory, and on to a device of its own.

use super::{Fetcher, Ready, ReadyMemory, Source, leased};
use crate::Result;
use crate::copies::{Cargo, Link};
use crate::on_demand::OnDemand;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;
use terrace_aio::Urgency;
use terrace_device::{Region, Upload};
use terrace_tiers::{BlobKey, BlobKind, DiskStore, Generation, SharedBytes, StoreSpec};

impl Fetcher<'_> {
    /// Reads chunks of a group that is [not whole](Ready::is_whole), each to its place.
    pub(crate) fn complete(&mut self, ready: Ready, runs: &[Range<usize>]) -> Result<Ready> {
        if runs.is_empty() {
            return Ok(ready);
        }
        let began = Instant::now();
        let Ready { group, memory, is_whole } = ready;
        let store = self.store();
        let memory = match memory {
            ReadyMemory::Host(bytes) => ReadyMemory::Host(read(store, group, runs, bytes)?),
            ReadyMemory::Slot { region, source } => {
                let source = source.expect("the host keeps what is not whole");
                let bytes = read(store, group, runs, source.release()?)?;
                let upload = self.upload_parts(group, bytes, region, &bytes_of(store.spec(), group, runs))?;
                let (region, source) = upload.ready_on(&*self.lane.compute)?;
                ReadyMemory::Slot { region, source: Some(source) }
            }
            ReadyMemory::Place { .. } => unreachable!("what stays on the device is whole"),
        };
        self.stalled += began.elapsed();
        Ok(Ready { group, memory, is_whole })
    }

    /// Starts the upload of what of a group was read ahead.
    pub(super) fn upload_ahead(
        &self,
        group: usize,
        bytes: SharedBytes,
        region: Region,
    ) -> Result<Upload<SharedBytes>> {
        let spec = self.store().spec();
        // A pass that uses all of it finds what another one read ahead for itself.
        let all = || std::iter::once(0..spec.chunks(group)).collect();
        let runs = self.on_demand[group].as_ref().map_or_else(all, OnDemand::ahead);
        self.upload_parts(group, bytes, region, &bytes_of(spec, group, &runs))
    }

    fn upload_parts(
        &self,
        group: usize,
        bytes: SharedBytes,
        region: Region,
        parts: &[Range<usize>],
    ) -> Result<Upload<SharedBytes>> {
        let upload = Upload::start_parts(&*self.lane.up, bytes, region, parts)?;
        let len = parts.iter().map(Range::len).sum();
        self.lane.started(Link::Up, Cargo::Weights(group), len, upload.event());
        Ok(upload)
    }

    fn store(&self) -> &DiskStore {
        match &self.source {
            Source::Thread { store, .. } => store,
            Source::Resident(..) => unreachable!("only what is read from disk comes in parts"),
        }
    }
}

/// Reads chunks of a group's weights, each to its place.
fn read(store: &DiskStore, group: usize, runs: &[Range<usize>], bytes: SharedBytes) -> Result<SharedBytes> {
    let SharedBytes::Lease(lease) = bytes else { unreachable!("what is not whole is in a slot") };
    let lease = Arc::try_unwrap(lease).expect("what is not whole has one user");
    let key = BlobKey { group, kind: BlobKind::Weight };
    let span = (0..store.spec().chunks(group), runs);
    Ok(leased(store.read_parts_as(Urgency::Soon, key, span, Generation::Newest, lease)?.wait()?))
}

/// Where chunks of a group's weights are among its bytes.
fn bytes_of(spec: &StoreSpec, group: usize, runs: &[Range<usize>]) -> Vec<Range<usize>> {
    let key = BlobKey { group, kind: BlobKind::Weight };
    // All chunks but the last are as long as the first.
    let start = |chunk: usize| chunk * spec.chunk_bytes(key, 0);
    runs.iter().map(|run| start(run.start)..start(run.end - 1) + spec.chunk_bytes(key, run.end - 1)).collect()
}
