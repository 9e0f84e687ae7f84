//! How large plans are, and what is left of budgets beside them.

use super::{EnginePlan, Planner};
use terrace_tiers::Tier;

impl EnginePlan {
    /// Of host and device memory.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.total(Tier::Host) + self.memory.total(Tier::Device)
    }
}

impl Planner<'_> {
    /// What a rank can have beside `plan`. Ranks of a node share its host memory.
    pub(super) fn room(&self, tier: Tier, plan: &EnginePlan) -> u64 {
        let left = |budget: u64| budget.saturating_sub(plan.memory.total(tier));
        match tier {
            Tier::Device => left(self.config.device_budget),
            _ => self.ranks().share(left(self.config.host_budget)),
        }
    }

    /// How far a plan is from fitting, and how large it is.
    pub(super) fn size(&self, plan: &EnginePlan) -> (u64, u64) {
        let beyond = |tier, budget: u64| plan.memory.total(tier).saturating_sub(budget);
        let missing =
            beyond(Tier::Host, self.config.host_budget) + beyond(Tier::Device, self.config.device_budget);
        (missing, plan.bytes())
    }

    pub(super) fn fits(&self, plan: &EnginePlan) -> bool {
        plan.memory.total(Tier::Host) <= self.config.host_budget
            && plan.memory.total(Tier::Device) <= self.config.device_budget
    }
}
