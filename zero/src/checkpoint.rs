//! State in and out: initial weights, resident state to and from a store.

use crate::cache::{exclusive, read_state, write_state};
use crate::device_state::DeviceState;
use crate::engine::Engine;
use crate::state::StateHome;
use crate::{EngineError, Result, WeightSource};
use half::{bf16, f16};
use serde_json::{Map, Value};
use terrace_kernels::DType;
use terrace_tiers::{BlobKey, DiskStore, GroupSpec, Lease, StoreSpec};

/// Fills the state from a weight source, chunk by chunk.
pub(crate) fn initialize(engine: &mut Engine, source: &mut dyn WeightSource) -> Result {
    if engine.network.quantized().is_some() {
        crate::quantize::load(engine, source)?;
    } else {
        load(engine, source)?;
    }
    if let StateHome::Disk(stored) = &mut engine.home {
        stored.commit(0, &[])?;
        stored.outdated = false;
    }
    Ok(())
}

fn load(engine: &mut Engine, source: &mut dyn WeightSource) -> Result {
    let spec = engine.plan.spec.clone();
    let chunk_elements = spec.chunk_elements as usize;
    let mut weights = vec![0f32; chunk_elements.min(engine.network.group_elements_max())];
    for group in 0..spec.groups.len() {
        for chunk in 0..spec.chunks(group) {
            let elements = spec.chunk_len(group, chunk);
            let weights = &mut weights[..elements];
            read_chunk(engine, source, group, chunk * chunk_elements, weights)?;
            let mut leases = engine.update_slots.acquire(&engine.kinds, elements);
            let mut slices: Vec<&mut [u8]> = leases.iter_mut().map(|lease| &mut **lease).collect();
            match &engine.optimizer {
                Some(optimizer) => optimizer.initialize(weights, &mut slices)?,
                None => narrow(weights, engine.config.dtype, slices[0]),
            }
            place(engine, group, chunk, leases)?;
        }
    }
    Ok(())
}

/// Reads the weights of a chunk of a group; padding is zero.
fn read_chunk(
    engine: &Engine,
    source: &mut dyn WeightSource,
    group: usize,
    start: usize,
    out: &mut [f32],
) -> Result {
    out.fill(0.0);
    let end = start + out.len();
    for param in &engine.network.groups[group].params {
        let (first, last) = (param.offset, param.offset + param.spec.elements());
        let (from, to) = (first.max(start), last.min(end));
        if from < to {
            source.read(&param.spec, from - first, &mut out[from - start..to - start])?;
        }
    }
    Ok(())
}

/// Puts a chunk of every kind where the state lives.
pub(crate) fn place(engine: &mut Engine, group: usize, chunk: usize, leases: Vec<Lease>) -> Result {
    for (index, mut lease) in leases.into_iter().enumerate() {
        let range = engine.kinds.range(index, &engine.plan.spec, group, chunk);
        let state = engine.state_on_device(group);
        if let Some(state) = state {
            lease = state.write(&engine.lane, group, index, range.start, lease)?;
        }
        match &engine.home {
            StateHome::Disk(stored) => {
                if let Some(copy) = &mut stored.cache.lock(group)[index] {
                    exclusive(copy)[range].copy_from_slice(&lease);
                }
                let key = BlobKey { group, kind: engine.kinds.blobs[index].kind };
                stored.store.write(key, chunk, lease)?;
            }
            StateHome::Resident(resident) if state.is_none() => {
                exclusive(&mut resident.change(group)[index])[range].copy_from_slice(&lease);
            }
            StateHome::Resident(_) => {}
        }
    }
    Ok(())
}

/// Weights as they are stored, in bytes that lie anywhere.
pub(crate) fn narrow(weights: &[f32], dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(bytemuck::cast_slice(weights)),
        DType::F16 => narrow_to(weights, out, |weight| f16::from_f32(weight).to_ne_bytes()),
        _ => narrow_to(weights, out, |weight| bf16::from_f32(weight).to_ne_bytes()),
    }
}

fn narrow_to(weights: &[f32], out: &mut [u8], bytes: impl Fn(f32) -> [u8; 2]) {
    for (out, weight) in out.as_chunks_mut::<2>().0.iter_mut().zip(weights) {
        *out = bytes(*weight);
    }
}

/// Refuses state that belongs to another model or run, and names what differs.
pub(crate) fn compare(expected: &StoreSpec, found: &StoreSpec) -> Result {
    if expected.identity != found.identity {
        return Err(EngineError::AnotherRun {
            stored: found.identity.clone(),
            given: expected.identity.clone(),
        });
    }
    if expected.kinds != found.kinds {
        return Err(EngineError::Config(format!(
            "the state on disk has another format: it was {} and is now {}. Resume with the original StateFormat and EngineConfig::dtype, or \
             choose another directory",
            format_words(found),
            format_words(expected)
        )));
    }
    if expected.generations != found.generations {
        return Err(EngineError::Config(generations_difference(expected, found)));
    }
    if expected.groups != found.groups {
        return Err(EngineError::Config(format!(
            "the state on disk belongs to another model: {}. Resume with the original model, or choose another directory",
            group_difference(&found.groups, &expected.groups)
        )));
    }
    Ok(())
}

/// The kinds of a layout, for messages.
fn format_words(spec: &StoreSpec) -> String {
    let kinds = spec.kinds.iter().map(|k| match k.block_elements {
        1 => format!("{} ({} bytes each)", k.kind.words(), k.block_bytes),
        elements => format!("{} ({} bytes for every {elements})", k.kind.words(), k.block_bytes),
    });
    kinds.collect::<Vec<_>>().join(" + ")
}

/// Says that state which is kept once cannot go on as state that is kept twice, or the other way round.
fn generations_difference(expected: &StoreSpec, found: &StoreSpec) -> String {
    let words = |spec: &StoreSpec| match spec.generations {
        1 => ("once, overwritten in place", "Durability::None"),
        _ => ("twice, the last step beside the next", "Durability::Step or Checkpoint"),
    };
    let ((kept, made_with), (wanted, _)) = (words(found), words(expected));
    format!(
        "the state on disk is kept {kept}, and this run would keep it {wanted}. Resume with {made_with}, or choose another \
         directory"
    )
}

/// The first group in which two models differ.
pub(crate) fn group_difference(stored: &[GroupSpec], given: &[GroupSpec]) -> String {
    let show = |group: Option<&GroupSpec>| {
        group.map_or_else(|| "nothing".into(), |g| format!("{} of {} elements", g.name, g.elements))
    };
    let longest = stored.len().max(given.len());
    let index = (0..longest).find(|&i| stored.get(i) != given.get(i)).unwrap_or(0);
    format!(
        "of {} groups, the one at place {} was {}; now of {} groups it is {}",
        stored.len(),
        index + 1,
        show(stored.get(index)),
        given.len(),
        show(given.get(index))
    )
}

/// The keys in which two JSON objects differ, with both values, in words.
pub(crate) fn differences(stored: &str, given: &str) -> String {
    let Some(mut found) = identity_differences(stored, given) else {
        return "its description differs".into();
    };
    found.sort_by(|a, b| a.0.cmp(&b.0));
    let show = |value: Option<Value>| value.map_or_else(|| "nothing".into(), |value| value.to_string());
    let parts =
        found.into_iter().map(|(key, [was, is])| format!("{key} was {} and is now {}", show(was), show(is)));
    parts.collect::<Vec<_>>().join(", ")
}

/// The entries in which two identities differ: key, stored value and given value, first those that are given. `None` if either is no JSON
/// object.
#[doc(hidden)]
pub fn identity_differences(stored: &str, given: &str) -> Option<Vec<(String, [Option<Value>; 2])>> {
    let parse = |text: &str| serde_json::from_str::<Map<String, Value>>(text).ok();
    let (stored, given) = (parse(stored)?, parse(given)?);
    let keys = given.keys().chain(stored.keys().filter(|key| !given.contains_key(*key)));
    let differing = keys.filter(|key| stored.get(*key) != given.get(*key));
    Some(differing.map(|key| (key.clone(), [stored.get(key).cloned(), given.get(key).cloned()])).collect())
}

/// Fills resident state from a store.
pub(crate) fn load_resident(engine: &Engine, store: &DiskStore) -> Result {
    let StateHome::Resident(resident) = &engine.home else { return Ok(()) };
    let all = engine.kinds.all();
    for group in 0..resident.groups() {
        if engine.state_on_device(group).is_some() {
            continue;
        }
        read_state(store, &engine.kinds, &engine.update_slots, group, &all, |kind, range, lease| {
            exclusive(&mut resident.change(group)[kind])[range].copy_from_slice(&lease);
            Ok(())
        })?;
    }
    engine.load_to_device(store)
}

impl Engine {
    /// The device's state, if that of `group` is there.
    pub(crate) fn state_on_device(&self, group: usize) -> Option<&DeviceState> {
        self.device_state.as_ref().filter(|state| state.has(group))
    }

    /// Starts writing all state that is on the device.
    pub(crate) fn write_from_device(&self, store: &DiskStore) -> Result {
        let Some(state) = &self.device_state else { return Ok(()) };
        let all = self.kinds.all();
        for group in state.groups() {
            write_state(store, &self.kinds, &self.update_slots, group, &all, |kind, range, lease| {
                state.read(&self.lane, group, kind, range.start, lease)
            })?;
        }
        Ok(())
    }

    /// Reads what of the state on disk is in memory, too, or on the device, after a step that failed or where it never was.
    ///
    /// # Errors
    /// A tier failed, or the step that failed has overwritten the only state.
    pub(crate) fn refresh(&mut self) -> Result {
        let Some(stored) = self.home.stored() else { return Ok(()) };
        stored.store.require_whole()?;
        if !stored.outdated {
            return Ok(());
        }
        let groups = 0..self.plan.spec.groups.len();
        stored.cache.read(&stored.store, &self.kinds, &self.update_slots, groups)?;
        self.load_to_device(&stored.store)?;
        if let StateHome::Disk(stored) = &mut self.home {
            stored.outdated = false;
        }
        Ok(())
    }

    /// Reads the last commit of state on disk for its checksums, but for what [`refresh`](Self::refresh) reads. A step that found damage
    /// would find it after it has overwritten a part of the commit before.
    ///
    /// # Errors
    /// A chunk is damaged, or a tier failed.
    pub(crate) fn verify_committed(&self) -> Result {
        let Some(stored) = self.home.stored() else { return Ok(()) };
        for group in 0..self.plan.spec.groups.len() {
            if self.state_on_device(group).is_some() {
                continue;
            }
            let copied: Vec<bool> = stored.cache.lock(group).iter().map(Option::is_some).collect();
            let rest: Vec<usize> = (0..copied.len()).filter(|&kind| !copied[kind]).collect();
            read_state(&stored.store, &self.kinds, &self.update_slots, group, &rest, |_, _, _| Ok(()))?;
        }
        Ok(())
    }

    /// Reads all state that is to be on the device from the last commit of `store`.
    fn load_to_device(&self, store: &DiskStore) -> Result {
        let Some(state) = &self.device_state else { return Ok(()) };
        let all = self.kinds.all();
        for group in state.groups() {
            read_state(store, &self.kinds, &self.update_slots, group, &all, |kind, range, lease| {
                state.write(&self.lane, group, kind, range.start, lease).map(drop)
            })?;
        }
        Ok(())
    }
}
