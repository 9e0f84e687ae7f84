//! What a device with its own memory gets: weights that stay, and state.

use super::{Choice, EnginePlan, Planner};
use crate::device_weights::DeviceRoom;
use crate::fetch::UPLOAD_WINDOW;
use crate::{EngineError, Placement, Result};
use terrace_tiers::{MemoryPlan, Tier};

impl Planner<'_> {
    /// How many groups have their state on the device, unless the plan is to find out.
    pub(super) fn fixed_state_groups(&self) -> Result<Option<usize>> {
        let (config, network) = (self.config, self.network);
        let all = network.groups.len();
        let asked = config.overrides.state_groups;
        let Some(training) = &config.training else {
            // Frozen weights need no other place than the one where kernels read them.
            let alone = !self.backend.device.unified() && config.placement == Placement::None;
            return Ok(Some(if alone { asked.unwrap_or(all).min(all) } else { 0 }));
        };
        // What is on the device is written to disk by saves alone.
        let every_step = config.placement == Placement::Disk && !config.commits_at_saves();
        if !self.device_updates || every_step {
            let wanted =
                asked.is_some_and(|groups| groups > 0) || training.host_part.is_some_and(|part| part < 1.0);
            if wanted && !self.backend.device.unified() && !every_step {
                return Err(EngineError::Config(format!(
                    "state of {} cannot be updated on this device: let the host hold all of it (a ratio of 1), or use AdamW",
                    training.optimizer
                )));
            }
            return Ok(Some(0));
        }
        Ok(match (asked, training.host_part, config.placement) {
            (Some(groups), ..) => Some(groups.min(all)),
            (None, Some(part), Placement::Host | Placement::Disk) => {
                let rest = (1.0 - part) * network.elements() as f64;
                let of = |groups: usize| {
                    network.groups[all - groups..].iter().map(|g| g.elements as f64).sum::<f64>()
                };
                let off = |groups: &usize| (of(*groups) - rest).abs();
                (0..=all).min_by(|a, b| off(a).total_cmp(&off(b)))
            }
            (None, _, Placement::None) => Some(all),
            _ => None,
        })
    }

    /// Puts as many groups' state on the device as the host has no room for. `plan` is that of `choice`.
    pub(super) fn relieve_host(
        &self,
        mut choice: Choice,
        mut plan: EnginePlan,
    ) -> Result<(Choice, EnginePlan)> {
        if self.config.placement == Placement::Disk {
            return Ok((choice, plan));
        }
        let chunk_bytes = plan.windows.slot_elements * self.network.element_bytes;
        while choice.state_groups < self.network.groups.len() {
            let mut excess = plan.memory.total(Tier::Host).saturating_sub(self.config.host_budget);
            if excess == 0 || plan.memory.total(Tier::Device) > self.config.device_budget {
                break;
            }
            while excess > 0 && choice.state_groups < self.network.groups.len() {
                choice.state_groups += 1;
                let elements = self.state().groups[self.network.groups.len() - choice.state_groups].elements;
                let parked = elements.div_ceil(choice.chunk_elements) * chunk_bytes;
                let relieved = self.kinds.bytes(elements as u64) + parked as u64;
                excess = excess.saturating_sub(relieved * self.ranks().per_node() as u64);
            }
            plan = self.evaluate(choice, &plan.windows.caching)?;
        }
        Ok((choice, plan))
    }

    /// Raises the number of groups whose state is on the device, if all weights stay there. `plan` is that of `choice`.
    pub(super) fn own_what_fits(&self, choice: Choice, plan: EnginePlan) -> Result<(Choice, EnginePlan)> {
        let all = self.network.groups.len();
        if plan.windows.device_room.staying < all {
            return Ok((choice, plan));
        }
        let bytes = |groups: usize| {
            let room = self.device_room(Choice { state_groups: groups, ..choice });
            let weights = room.weights(self.network) + room.state_bytes(self.state(), self.kinds);
            weights + room.gradient_bytes(self.state(), self.config.dtype)
        };
        let others = plan.memory.total(Tier::Device) - bytes(choice.state_groups);
        let room = self.config.device_budget.saturating_sub(others);
        let state_groups = (choice.state_groups..=all).rev().find(|&groups| bytes(groups) <= room);
        match state_groups {
            Some(state_groups) if state_groups > choice.state_groups => {
                let choice = Choice { state_groups, ..choice };
                let plan = self.evaluate(choice, &plan.windows.caching)?;
                Ok((choice, plan))
            }
            _ => Ok((choice, plan)),
        }
    }

    /// `plan`, which is that of `choice`, or one in which weights stay on the device, if `plan` does not fit and that takes less: slots are
    /// as long as the largest group, and few groups beside a large one have less than several of those.
    pub(super) fn settle_where_it_saves(
        &self,
        choice: Choice,
        plan: EnginePlan,
    ) -> Result<(Choice, EnginePlan)> {
        let is_fixed = self.config.overrides.device_groups.is_some() || self.backend.device.unified();
        if is_fixed || self.fits(&plan) {
            return Ok((choice, plan));
        }
        let with = |device_groups| Choice { device_groups, ..choice };
        let taken = |groups: &usize| self.device_room(with(*groups)).weights(self.network);
        let least = (0..=self.network.groups.len()).min_by_key(taken).unwrap_or(0);
        if taken(&least) >= plan.windows.device_room.weights(self.network) {
            return Ok((choice, plan));
        }
        let plan = self.evaluate(with(least), &plan.windows.caching)?;
        Ok((with(least), plan))
    }

    /// Raises the number of groups whose weights stay on the device. `plan` is that of `choice`.
    pub(super) fn settle_what_fits(&self, choice: Choice, plan: EnginePlan) -> Result<(Choice, EnginePlan)> {
        if self.config.overrides.device_groups.is_some() || self.backend.device.unified() {
            return Ok((choice, plan));
        }
        let taken = plan.windows.device_room.weights(self.network);
        let others = plan.memory.total(Tier::Device) - taken;
        let room = self.config.device_budget.saturating_sub(others);
        let with = |device_groups| Choice { device_groups, ..choice };
        let fits = |&groups: &usize| self.device_room(with(groups)).weights(self.network) <= room;
        let device_groups = (0..=self.network.groups.len()).rev().find(fits).unwrap_or(0);
        let choice = with(device_groups);
        if self.device_room(choice) == plan.windows.device_room {
            return Ok((choice, plan));
        }
        let plan = self.evaluate(choice, &plan.windows.caching)?;
        Ok((choice, plan))
    }

    /// The last resort: compute waits for weights that could have come while it was busy.
    pub(super) fn add_fewer_uploads(&self, choices: &mut Vec<Choice>) {
        if self.backend.device.unified() || self.config.overrides.uploads_ahead.is_some() {
            return;
        }
        let smallest: Vec<Choice> = choices.iter().filter(|choice| !choice.signals_stay).copied().collect();
        for uploads_ahead in (0..UPLOAD_WINDOW).rev() {
            choices.extend(smallest.iter().map(|&choice| Choice { uploads_ahead, ..choice }));
        }
    }

    /// Memory of the device for weights and state.
    pub(super) fn device_room(&self, choice: Choice) -> DeviceRoom {
        let network = self.network;
        let together = (0..network.blocks.len()).map(|b| network.groups_of(b).len()).max().unwrap_or(1);
        let (slots, state) = (choice.uploads_ahead + together, choice.state_groups);
        if self.ranks().are_several() {
            return DeviceRoom::of_shards(network, slots, choice.device_groups, state);
        }
        // Where nothing else is to hold the weights, all stay.
        let alone = self.config.placement == Placement::None;
        let staying = if alone { network.groups.len() } else { choice.device_groups };
        DeviceRoom::of(self.backend, network, slots, staying, state)
    }

    pub(super) fn add_device_room(&self, memory: &mut MemoryPlan, room: DeviceRoom) {
        let (network, state, all) = (self.network, self.state(), self.network.groups.len());
        let what = format!("weights that stay on the device, of {} of {all} groups", room.with_places());
        memory.add(Tier::Device, what, 1, room.places(network));
        if room.state == 0 {
            return;
        }
        for blob in &self.kinds.blobs {
            let what =
                format!("state on the device, of {} of {all} groups: {}", room.state, blob.kind.words());
            memory.add(Tier::Device, what, 1, room.kind_bytes(state, blob));
        }
        if self.config.training.is_some() {
            let what = "gradients of state on the device, and their sums";
            memory.add(Tier::Device, what, 1, room.gradient_bytes(state, self.config.dtype));
        }
    }
}
