//! Which blocks' keys and values stay where kernels are, and which in host memory, of a cache that may be in a lower tier.

use super::{Choice, EnginePlan, Planner};
use crate::Result;
use crate::kv::{KvPlan, KvRoom};
use terrace_tiers::Tier;

impl Planner<'_> {
    /// What is planned for a key/value cache that may be away from the device.
    pub(super) fn kv_plan(&self, room: KvRoom) -> Option<KvPlan> {
        KvPlan::new(self.config, self.network, self.backend.device.unified(), room)
    }

    /// Raises the numbers of blocks whose keys and values stay on the device, and in host memory, to the most that fit beside
    /// `plan`, which is that of `choice`. What would otherwise be on disk takes no more host memory than copies of it may.
    pub(super) fn hold_what_fits(&self, mut choice: Choice, mut plan: EnginePlan) -> Result<EnginePlan> {
        let (unified, overrides) = (self.backend.device.unified(), self.config.overrides);
        let lowest = self.config.kv_place(unified);
        let Some(kv) = self.kv_plan(choice.kv_room) else { return Ok(plan) };
        let each = kv.buffer_bytes() as u64;
        let copies = (0..self.kinds.blobs.len())
            .map(|kind| plan.windows.caching.bytes_of(self.state(), kind, self.kinds))
            .sum::<u64>();
        let all = [Tier::Device, Tier::Host, Tier::Disk].map(|tier| kv.count(tier)).iter().sum::<usize>();
        let mut held = (self.config.cache_bytes.saturating_sub(copies) / each) as usize;
        if overrides.kv_on_device.is_none() {
            let most = all.saturating_sub(choice.kv_room.host);
            let most = if unified { most.min(held) } else { most };
            let room = self.room(self.arena_tier(), &plan) / each;
            let with = |device| KvRoom { device, ..choice.kv_room };
            (choice, plan) = self.most(choice, plan, room, most, with)?;
            if unified {
                held -= choice.kv_room.device;
            }
        }
        if overrides.kv_on_host.is_none() && lowest == Tier::Disk && !unified {
            let most = all.saturating_sub(choice.kv_room.device).min(held);
            let room = self.room(Tier::Host, &plan) / each;
            let with = |host| KvRoom { host, ..choice.kv_room };
            (_, plan) = self.most(choice, plan, room, most, with)?;
        }
        Ok(plan)
    }

    /// The plan with as many blocks of some kind as fit, no more than `most`; `room` is of about so many.
    fn most(
        &self,
        choice: Choice,
        plan: EnginePlan,
        room: u64,
        most: usize,
        with: impl Fn(usize) -> KvRoom,
    ) -> Result<(Choice, EnginePlan)> {
        // Where all are held, there are no buffers for those that travel.
        let about = usize::try_from(room).unwrap_or(usize::MAX).saturating_add(4).min(most);
        for count in (1..=about).rev() {
            let choice = Choice { kv_room: with(count), ..choice };
            let more = self.evaluate(choice, &plan.windows.caching)?;
            if self.fits(&more) {
                return Ok((choice, more));
            }
        }
        Ok((choice, plan))
    }
}
