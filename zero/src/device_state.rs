//! Training state in the memory of a device that has its own, which updates it there.
//!
//! The last groups may have all of their state on the device: its weights are read by kernels where they are, its gradient never
//! leaves, and the update is a kernel whose bits are those of the host's ([`DeviceOptimizer`]). Of frozen weights the state is the
//! weights alone. Only loading and saving move it, chunk by chunk; so beside state on disk it needs saves to be what makes a step
//! durable. Which groups these are changes no result.
//!
//! The update is given to the device's compute stream as soon as the gradient's norm is known, so that whatever is computed next
//! comes after it.

use crate::copies::Cargo;
use crate::device_weights::DeviceRoom;
use crate::lane::Lane;
use crate::network::Network;
use crate::runs::Runs;
use crate::state::StateKinds;
use crate::{Backend, EngineError, Result};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use terrace_device::{BytesMut, Region};
use terrace_kernels::update::SumOfSquares as SumKernel;
use terrace_kernels::{DType, View, ViewMut};
use terrace_optimizer::{DeviceOptimizer, StepArgs, SumOfSquares};
use terrace_tiers::Lease;

/// Bytes of a group's sum of squares.
const SUM: usize = 8;

/// The state of the groups from `first` on.
#[derive(Debug)]
pub(crate) struct DeviceState {
    first: usize,
    /// Which kind is the weights.
    weight: usize,
    /// The kinds of each group. A kind is away only while a copy has it, or after one failed.
    groups: Vec<Mutex<Vec<Option<Arc<Region>>>>>,
}

/// Their gradients, between backward and update.
pub(crate) struct DeviceGradients {
    first: usize,
    dtype: DType,
    kernel: Arc<dyn SumKernel>,
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    groups: Vec<Gradient>,
    /// A sum of squares of each group, f64. Away only while a copy has it, or after one failed.
    sums: Option<Region>,
}

#[derive(Debug)]
struct Gradient {
    region: Region,
    /// Whether it is one of this step.
    is_parked: bool,
}

/// Bytes of one kind of a group's state, or of its gradient, in an arena.
pub(crate) fn region_bytes(bytes: u64) -> u64 {
    bytes.next_multiple_of(256).max(256)
}

/// Bytes of so many sums of squares in an arena.
pub(crate) fn sums_bytes(groups: usize) -> u64 {
    region_bytes((groups * SUM) as u64)
}

impl DeviceState {
    /// Memory for the groups that `room` has on the device; `None` if there are none.
    pub(crate) fn new(
        backend: &Backend,
        network: &Network,
        kinds: &StateKinds,
        room: DeviceRoom,
    ) -> Result<Option<Self>> {
        if room.state == 0 {
            return Ok(None);
        }
        let arena = backend.device.arena(room.state_bytes(network, kinds) as usize)?;
        let first = room.first_with_state(network);
        let groups = network.groups[first..].iter().map(|group| {
            let region = |kind: &terrace_tiers::BlobSpec| {
                Ok(Some(Arc::new(arena.alloc(kind.bytes(group.elements as u64) as usize)?)))
            };
            Ok(Mutex::new(kinds.blobs.iter().map(region).collect::<Result<_>>()?))
        });
        Ok(Some(Self { first, weight: kinds.weight, groups: groups.collect::<Result<_>>()? }))
    }

    /// Whether a group is here.
    pub(crate) fn has(&self, group: usize) -> bool {
        group >= self.first
    }

    /// The groups that are here.
    pub(crate) fn groups(&self) -> Range<usize> {
        self.first..self.first + self.groups.len()
    }

    /// The groups that are here and the weights of each, to be dropped before the next update, load or save.
    pub(crate) fn weights(&self) -> impl Iterator<Item = (usize, Result<Arc<Region>>)> {
        self.groups.iter().enumerate().map(|(index, kinds)| {
            let weights = lock(kinds)[self.weight].as_ref().map(Arc::clone);
            (self.first + index, weights.ok_or_else(lost))
        })
    }

    /// Copies `bytes` to one kind of a group, from byte `at` on, and gives them back.
    pub(crate) fn write(
        &self,
        lane: &Lane,
        group: usize,
        kind: usize,
        at: usize,
        bytes: Lease,
    ) -> Result<Lease> {
        let mut kinds = lock(&self.groups[group - self.first]);
        let region = take(&mut kinds[kind])?;
        let (region, source) = lane.upload_at(Cargo::State(group), bytes, region, at)?;
        kinds[kind] = Some(Arc::new(region));
        Ok(source.release()?)
    }

    /// Copies one kind of a group, from byte `at` on, to all of `bytes`.
    pub(crate) fn read(
        &self,
        lane: &Lane,
        group: usize,
        kind: usize,
        at: usize,
        bytes: Lease,
    ) -> Result<Lease> {
        let mut kinds = lock(&self.groups[group - self.first]);
        let region = take(&mut kinds[kind])?;
        let (region, bytes) = lane.download_at(Cargo::State(group), region, at, bytes)?.wait()?;
        kinds[kind] = Some(Arc::new(region));
        Ok(bytes)
    }

    /// Gives the device the update of all groups, with the parked gradients.
    pub(crate) fn update(
        &self,
        optimizer: &DeviceOptimizer,
        args: &StepArgs,
        runs: &Runs,
        kinds: &StateKinds,
        gradients: &DeviceGradients,
    ) -> Result {
        for (index, state) in self.groups.iter().enumerate() {
            let group = self.first + index;
            let mut held = gradients.lock();
            let Gradient { region: gradient, is_parked } = &mut held.groups[index];
            let elements = gradient.len() / gradients.dtype.size();
            if !std::mem::take(is_parked) && elements > 0 {
                return Err(EngineError::Config(format!(
                    "group {group} has no gradient; every block must be used in a step"
                )));
            }
            let mut state = lock(state);
            let mut start = 0;
            for (elements, rates) in runs.within(group, 0..elements) {
                let run = start..start + elements;
                start = run.end;
                if rates.frozen {
                    continue;
                }
                let gradient = elements_of(gradient, gradients.dtype, &run);
                let parts = state.iter_mut().zip(&kinds.blobs).map(|(region, kind)| {
                    let (start, end) = (kind.bytes(run.start as u64), kind.bytes(run.end as u64));
                    exclusive(region).map(|bytes| bytes.slice(start as usize, end as usize))
                });
                optimizer.update(&rates.args(args), gradient, parts.collect::<Result<_>>()?)?;
            }
        }
        Ok(())
    }
}

impl DeviceGradients {
    /// Memory for the gradients of the groups that `room` has on the device; `None` if there are none.
    pub(crate) fn new(
        backend: &Backend,
        network: &Network,
        dtype: DType,
        room: DeviceRoom,
    ) -> Result<Option<Self>> {
        let (Some(kernels), true) = (&backend.updates, room.state > 0) else { return Ok(None) };
        let arena = backend.device.arena(room.gradient_bytes(network, dtype) as usize)?;
        let first = room.first_with_state(network);
        let groups = network.groups[first..].iter().map(|group| {
            Ok(Gradient { region: arena.alloc(group.elements * dtype.size())?, is_parked: false })
        });
        let groups = groups.collect::<Result<Vec<_>>>()?;
        let sums = Some(arena.alloc(groups.len() * SUM)?);
        let held = Mutex::new(Held { groups, sums });
        Ok(Some(Self { first, dtype, kernel: Arc::clone(&kernels.sum_of_squares), held }))
    }

    /// The first group whose gradient stays here.
    pub(crate) fn first(&self) -> usize {
        self.first
    }

    /// Whether a group's gradient stays here.
    pub(crate) fn has(&self, group: usize) -> bool {
        group >= self.first
    }

    /// Goes on from what an earlier use of a group in this step parked; false if there was none.
    pub(crate) fn begin(&self, backend: &Backend, group: usize, acc: &mut Region) -> Result<bool> {
        let held = self.lock();
        let Gradient { region, is_parked } = &held.groups[group - self.first];
        if *is_parked {
            let all = 0..region.len() / self.dtype.size();
            let out = ViewMut::new(acc.bytes_mut(), DType::F32, &[all.end]);
            backend.kernels.elementwise.cast(elements_of(region, self.dtype, &all), out)?;
        }
        Ok(*is_parked)
    }

    /// Parks a group's accumulated gradient; its norm counts when this was the group's last use.
    pub(crate) fn park(&self, backend: &Backend, group: usize, acc: &Region, last_use: bool) -> Result {
        let mut held = self.lock();
        let Held { groups, sums } = &mut *held;
        let index = group - self.first;
        let Gradient { region, is_parked } = &mut groups[index];
        let elements = acc.len() / 4;
        if elements == 0 {
            return Ok(());
        }
        let ops = &backend.kernels.elementwise;
        let from = View::new(acc.bytes(), DType::F32, &[elements]);
        ops.cast(from, ViewMut::new(region.bytes_mut(), self.dtype, &[elements]))?;
        *is_parked = true;
        if last_use {
            let sums = sums.as_mut().ok_or_else(lost)?;
            let at = index * SUM..(index + 1) * SUM;
            ops.zero(ViewMut::new(sums.bytes_mut().slice(at.start, at.end), DType::F32, &[SUM / 4]))?;
            let sum = ViewMut::new(sums.bytes_mut().slice(at.start, at.end), DType::F64, &[1]);
            self.kernel.add(elements_of(region, self.dtype, &(0..elements)), sum)?;
        }
        Ok(())
    }

    /// The sums of squares of this step, by group, from the first that is here.
    pub(crate) fn sums(&self, lane: &Lane) -> Result<Vec<SumOfSquares>> {
        let mut held = self.lock();
        let sums = held.sums.take().ok_or_else(lost)?;
        let bytes = vec![0; sums.len()];
        let (sums, bytes) = lane.download(Cargo::Small, sums, bytes)?.wait()?;
        held.sums = Some(sums);
        let totals = bytes.chunks_exact(SUM).zip(&held.groups).map(|(bytes, gradient)| {
            // Padding of an empty group is no sum.
            if gradient.is_parked {
                SumOfSquares::from_total(f64::from_le_bytes(bytes.try_into().expect("eight bytes")))
            } else {
                SumOfSquares::new()
            }
        });
        Ok(totals.collect())
    }

    /// Forgets everything of a step that failed.
    pub(crate) fn clear(&self) {
        self.lock().groups.iter_mut().for_each(|gradient| gradient.is_parked = false);
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for DeviceGradients {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceGradients").field("first", &self.first).finish_non_exhaustive()
    }
}

fn lock(kinds: &Mutex<Vec<Option<Arc<Region>>>>) -> MutexGuard<'_, Vec<Option<Arc<Region>>>> {
    kinds.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A region that nobody else holds, out of its place.
fn take(place: &mut Option<Arc<Region>>) -> Result<Region> {
    let region = place.take().ok_or_else(lost)?;
    Ok(Arc::into_inner(region).expect("no schedule holds state while it is moved"))
}

/// The bytes of a region that nobody else holds.
fn exclusive(place: &mut Option<Arc<Region>>) -> Result<BytesMut<'_>> {
    let region = place.as_mut().ok_or_else(lost)?;
    Ok(Arc::get_mut(region).expect("no schedule holds state while it is updated").bytes_mut())
}

fn lost() -> EngineError {
    EngineError::Config(
        "state on the device was lost with a copy that failed: go on from the last save (Engine::resume)"
            .into(),
    )
}

fn elements_of<'r>(region: &'r Region, dtype: DType, elements: &Range<usize>) -> View<'r> {
    let size = dtype.size();
    View::new(region.bytes().slice(elements.start * size, elements.end * size), dtype, &[elements.len()])
}
