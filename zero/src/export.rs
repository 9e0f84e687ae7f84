//! Weights out of the engine: now, or those of a committed step while training goes on.
//!
//! A committed step stays where it is while the next one is written beside it, so that a thread of its own can read it at leisure.
//! Only the commit of the next step waits for that thread: what follows would overwrite what it reads.

use crate::engine::Engine;
use crate::network::Placed;
use crate::{EngineError, ParamSpec, Result, WeightReader};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use terrace_kernels::DType;
use terrace_tiers::{BlobKey, BlobKind, DiskStore, Generation, Held, Lease, Pool};

/// What begins with a commit.
pub(crate) type AfterCommit = Box<dyn FnOnce(&Arc<DiskStore>) + Send>;

/// An export that may still be going on.
#[derive(Debug)]
pub struct Exporting<T> {
    result: Receiver<T>,
    arrived: Option<T>,
}

impl<T> Exporting<T> {
    fn new() -> (SyncSender<T>, Self) {
        let (sender, result) = sync_channel(1);
        (sender, Self { result, arrived: None })
    }

    /// Whether [`wait`](Self::wait) would not block.
    pub fn is_finished(&mut self) -> bool {
        if self.arrived.is_some() {
            return true;
        }
        match self.result.try_recv() {
            Ok(result) => self.arrived = Some(result),
            Err(TryRecvError::Disconnected) => {}
            Err(TryRecvError::Empty) => return false,
        }
        true
    }

    /// Waits for what the export gave; `None` if it was given up, since its step was never committed, its
    /// [save](Engine::finish_save) failed, it had no thread, or it panicked.
    /// To be called after a step or a [`flush`](Engine::flush), without which an export may wait for the commit of its step.
    pub fn wait(self) -> Option<T> {
        self.arrived.or_else(|| self.result.recv().ok())
    }
}

impl Engine {
    /// Reads the current weights, for export, after a [`flush`](Self::flush). Nothing else may use the engine meanwhile.
    ///
    /// # Errors
    /// A tier failed, or some weights are quantized.
    pub fn weights(&mut self) -> Result<impl WeightReader + '_> {
        self.flush()?;
        let map = self.weight_map()?;
        Ok(Reader { map, cached: None, source: &*self })
    }

    /// Gives the weights of the last step to `export` on a thread of its own, while the next steps go on. It begins when that step is
    /// committed, which may be during the next one; the commit of the step after it waits for `export`. Where only saves commit,
    /// this is one, which goes on beside the next step, too, whose update waits for its commit. State in memory is saved so as well: an
    /// update waits where it would change what is not copied yet. Of state on disk that is kept once nothing is overwritten before
    /// `export` has ended, which the next step's update waits for. The plan has a buffer for one chunk, so that of two at a time the second
    /// reads its first weights once the first has ended.
    ///
    /// # Errors
    /// As [`save`](Self::save) and [`weights`](Self::weights); what goes wrong later with a save is said by
    /// [`finish_save`](Self::finish_save) or, of state on disk, by the step that waits for it, and the export is given up.
    pub fn export_beside<T: Send + 'static>(
        &mut self,
        export: impl FnOnce(&mut dyn WeightReader) -> T + Send + 'static,
    ) -> Result<Exporting<T>> {
        let (sender, exporting) = Exporting::new();
        let map = self.weight_map()?;
        let buffer = self.saves.export_buffer(map.chunk_bytes)?;
        let run = move |source: Held| {
            let mut reader = Reader { map, cached: None, source: Shelf { held: source, buffer } };
            let result = export(&mut reader);
            // Who hears of it finds the store let go of.
            drop(reader);
            // Whether anybody still wants to know is not this thread's matter.
            let _ = sender.send(result);
        };
        let start: AfterCommit = Box::new(move |store| {
            let Ok(held) = store.hold() else { return };
            // Without a thread `run` is dropped, which tells who waits for it.
            let _ = std::thread::Builder::new().name("terrace-export".into()).spawn(move || run(held));
        });
        match (self.home.stored(), &self.pending) {
            (Some(_), _) if self.config.commits_at_saves() => {
                if let Some(start) = self.commit_with_pending(start) {
                    self.flush()?;
                    self.begin_commit(Some(start))?;
                }
            }
            (Some(stored), Some(_)) => stored.after_commit().push(start),
            (Some(stored), None) => start(&stored.store),
            (None, _) => {
                self.flush()?;
                self.end_save();
                match self.saves.store.as_ref().filter(|_| self.is_saved()) {
                    Some(store) => start(store),
                    None => self.begin_save(Some(start))?,
                }
            }
        }
        Ok(exporting)
    }

    fn weight_map(&self) -> Result<WeightMap> {
        if let Some(format) = self.network.quantized().and_then(|spec| spec.quantized) {
            let message = format!("weights in {format} are for generation and cannot be exported");
            return Err(EngineError::Config(message));
        }
        let groups = self.network.groups.iter().enumerate();
        let dtype = self.config.dtype;
        Ok(WeightMap {
            dtype,
            params: Params::of(groups.flat_map(|(index, g)| g.params.iter().map(move |p| (index, p)))),
            kind: self.kinds.blobs[self.kinds.weight].kind,
            chunk_bytes: self.plan.spec.chunk_elements as usize * dtype.size(),
        })
    }
}

/// Where every parameter is.
struct WeightMap {
    dtype: DType,
    params: Params,
    kind: BlobKind,
    chunk_bytes: usize,
}

/// Reads weights through one chunk-sized buffer.
struct Reader<S> {
    map: WeightMap,
    cached: Option<(usize, usize, Lease)>,
    source: S,
}

/// What has the weights.
trait Source {
    /// Those of a group, if they are in memory.
    fn resident(&self, group: usize) -> Option<terrace_tiers::SharedBytes>;

    /// Reads a chunk of them.
    fn chunk(&self, key: BlobKey, chunk: usize) -> Result<Lease>;
}

impl<S: Source> WeightReader for Reader<S> {
    fn dtype(&self) -> DType {
        self.map.dtype
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.map.params.specs.clone()
    }

    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [u8]) -> Result {
        let WeightMap { dtype, params, kind, chunk_bytes } = &self.map;
        let (group, offset) = params.find(&param.name)?;
        let first = (offset + start) * dtype.size();
        if let Some(weights) = self.source.resident(group) {
            out.copy_from_slice(&weights[first..first + out.len()]);
            return Ok(());
        }
        for piece in pieces(first, out.len(), *chunk_bytes) {
            let at = (group, piece.chunk);
            let lease = match self.cached.take() {
                Some((group, chunk, lease)) if (group, chunk) == at => lease,
                // There may be but one buffer.
                other => {
                    drop(other);
                    self.source.chunk(BlobKey { group: at.0, kind: *kind }, at.1)?
                }
            };
            out[piece.out].copy_from_slice(&lease[piece.inside]);
            self.cached = Some((at.0, at.1, lease));
        }
        Ok(())
    }
}

impl Source for &Engine {
    fn resident(&self, group: usize) -> Option<terrace_tiers::SharedBytes> {
        self.home.resident_weights(group, &self.kinds)
    }

    fn chunk(&self, key: BlobKey, chunk: usize) -> Result<Lease> {
        let weight = self.kinds.weight;
        let range = self.kinds.range(weight, &self.plan.spec, key.group, chunk);
        let lease = self.update_slots.acquire_one(weight, range.len());
        if let Some(state) = self.state_on_device(key.group) {
            return state.read(&self.lane, key.group, weight, range.start, lease);
        }
        let store = self.home.disk().expect("weights that are not resident are in a store");
        Ok(store.read(key, chunk..chunk + 1, Generation::Newest, lease)?.wait()?)
    }
}

/// The weights of the last commit.
struct Shelf {
    held: Held,
    buffer: Pool,
}

impl Source for Shelf {
    fn resident(&self, _: usize) -> Option<terrace_tiers::SharedBytes> {
        None
    }

    fn chunk(&self, key: BlobKey, chunk: usize) -> Result<Lease> {
        let lease = self.buffer.acquire(self.held.spec().chunk_bytes(key, chunk));
        Ok(self.held.read(key, chunk..chunk + 1, lease)?.wait()?)
    }
}

/// Parameters, and where each is.
#[derive(Debug)]
pub(crate) struct Params {
    pub(crate) specs: Vec<ParamSpec>,
    /// The group of each, and where in that it begins.
    places: HashMap<String, (usize, usize)>,
}

impl Params {
    /// Of those with their groups.
    pub(crate) fn of<'p>(params: impl Iterator<Item = (usize, &'p Placed)>) -> Self {
        let mut of = Self { specs: Vec::new(), places: HashMap::new() };
        for (group, placed) in params {
            of.places.insert(placed.spec.name.clone(), (group, placed.offset));
            of.specs.push(placed.spec.clone());
        }
        of
    }

    /// The group of a parameter, and where in that it begins.
    pub(crate) fn find(&self, name: &str) -> Result<(usize, usize)> {
        let found = self.places.get(name).copied();
        found.ok_or_else(|| EngineError::Model(format!("the network has no parameter {name}")))
    }
}

/// A part of a range of bytes that lies in one chunk.
pub(crate) struct Piece {
    pub(crate) chunk: usize,
    /// Its bytes in the chunk.
    pub(crate) inside: Range<usize>,
    /// Its bytes in the range.
    pub(crate) out: Range<usize>,
}

/// Cuts `len` bytes of a group from `first` on at the ends of chunks.
pub(crate) fn pieces(first: usize, len: usize, chunk_bytes: usize) -> impl Iterator<Item = Piece> {
    let chunks = if len == 0 { 0..0 } else { first / chunk_bytes..(first + len).div_ceil(chunk_bytes) };
    chunks.map(move |chunk| {
        let start = chunk * chunk_bytes;
        let (from, to) = (first.max(start), (first + len).min(start + chunk_bytes));
        Piece { chunk, inside: from - start..to - start, out: from - first..to - first }
    })
}
