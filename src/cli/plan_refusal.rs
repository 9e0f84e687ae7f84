//! What `terrace plan` says of what does not fit.

use super::args::DurabilityFlag;
use super::knobs::{Knobs, is_about_disk_space};
use super::plan::{Choice, HEADER, Planned, Planning, row};
use crate::error::CliError;
use terrace_models::{TokenBatch, build};
use terrace_tiers::{ByteSize, MemoryPlan, Tier, TierError};
use terrace_zero::{DEVICE_BUDGET, Engine, EngineError, HOST_BUDGET};

impl Planning<'_> {
    /// Names `--disk-space` too in a refusal for want of memory, if what is `planned` with enough of that needs more.
    pub(super) fn with_disk_space(
        &self,
        mut error: EngineError,
        planned: impl FnOnce(&Self) -> Result<MemoryPlan, EngineError>,
    ) -> EngineError {
        if let EngineError::Tier(TierError::Plan(refusal)) = &mut error {
            let mut roomier = self.clone();
            for (budget, name) in
                [(&mut roomier.host_budget, HOST_BUDGET), (&mut roomier.device_budget, DEVICE_BUDGET)]
            {
                *budget = refusal.minimum_of(name).max(*budget);
            }
            let needed = planned(&roomier).map_or(0, |memory| memory.total(Tier::Disk));
            refusal.also.extend(self.lacks_disk(needed).map(|_| ("--disk-space", needed)));
        }
        error
    }

    /// `--disk-space`, if it is less than what is needed.
    fn lacks_disk(&self, needed: u64) -> Option<ByteSize> {
        self.args.disk_space.map(|space| ByteSize(space.0)).filter(|space| needed > space.0)
    }

    /// Refuses what needs more than `--disk-space`.
    pub(super) fn enough_disk(&self, memory: &MemoryPlan) -> Result<(), EngineError> {
        let needed = memory.total(Tier::Disk);
        let Some(space) = self.lacks_disk(needed) else {
            return Ok(());
        };
        Err(EngineError::Config(format!(
            "--disk-space of {space} is too small: this run needs {}.\n{}Raise it to {}",
            ByteSize(needed).rounded_up(),
            memory.breakdown(Tier::Disk),
            ByteSize(needed).rounded_up()
        )))
    }

    /// What does not fit, and what would: other settings, the same with the state kept once, and other choices.
    pub(super) fn refusal(
        &self,
        error: EngineError,
        chosen: Choice,
        choices: &[(Choice, Result<Planned, EngineError>)],
    ) -> CliError {
        let is_disk = matches!(&error, EngineError::Config(words) if is_about_disk_space(words));
        let config = self.config_of(chosen, self.args.durability);
        let knobs = Knobs {
            config: &config,
            backend: &self.backend,
            model: &self.model,
            runs: &self.runs,
            disk_space: self.args.disk_space.map(|space| space.0),
            resumes: false,
        };
        let error = self.with_disk_space(knobs.advise(error), |roomier| {
            let sample = TokenBatch::new(&self.model).shape(chosen.batch, self.length);
            let config = roomier.config_of(chosen, self.args.durability);
            Ok(Engine::outlook(config, &self.backend, build(&self.model), &sample, &self.runs)?.memory)
        });
        let once = match self.args.durability {
            DurabilityFlag::Step | DurabilityFlag::Checkpoint if is_disk => {
                self.of_durability(chosen, DurabilityFlag::None).ok()
            }
            _ => None,
        };
        let Some(once) = once else { return with_alternatives(error, choices) };
        let error = format!(
            "{error}, or keep the state once instead of twice: --durability none needs {} (a run that is killed or fails then \
             starts over)",
            ByteSize(once.outlook.memory.total(Tier::Disk)).rounded_up()
        );
        with_alternatives(EngineError::Config(error), choices)
    }
}

/// A refusal, with the choices that would do.
fn with_alternatives(error: EngineError, choices: &[(Choice, Result<Planned, EngineError>)]) -> CliError {
    let fitting: Vec<String> = choices
        .iter()
        .filter_map(|(choice, planned)| {
            planned.as_ref().ok().map(|planned| row(*choice, Some(planned), false))
        })
        .collect();
    and_what_fits(error, "state format, place or batch", HEADER, &fitting)
}

/// A refusal, with the rows of the table that fit.
pub(super) fn and_what_fits(error: EngineError, what: &str, header: &str, fitting: &[String]) -> CliError {
    let more = if fitting.is_empty() {
        format!("\nno other {what} of the table fits either")
    } else {
        format!("\nthese fit:\n{header}\n{}", fitting.join("\n"))
    };
    match CliError::from(error) {
        CliError::Usage(message) => CliError::Usage(format!("{message}{more}")),
        other => other,
    }
}
