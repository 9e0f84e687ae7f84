//! DeepSpeed's `OneCycle`: the learning rate goes up and down once while the momentum goes down and up, then both decay.
//!
//! After Smith's 1cycle policy (<https://arxiv.org/abs/1803.09820>). Every expression has DeepSpeed's order of operations,
//! because a phase that is one rounding off its boundary is a whole stair off.

/// The parameters of `OneCycle`, under DeepSpeed's names and with its defaults in [`OneCycle::new`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OneCycle {
    /// The rate at both ends of the cycle.
    pub cycle_min_lr: f64,
    /// The rate at the top.
    pub cycle_max_lr: f64,
    /// How fast the rate decays after the cycle: divided by `1 + decay_lr_rate` for the first `decay_step_size` steps,
    /// and so on. 0 keeps it at the minimum.
    pub decay_lr_rate: f64,
    /// Steps up.
    pub cycle_first_step_size: u64,
    /// Steps down; as many as up when absent.
    pub cycle_second_step_size: Option<u64>,
    /// Stairs on the way up; 0 goes up smoothly.
    pub cycle_first_stair_count: u64,
    /// Stairs on the way down; as many as up when absent.
    pub cycle_second_stair_count: Option<u64>,
    /// Steps of one interval of decay; 0 for no decay.
    pub decay_step_size: u64,
    /// The cycle of the momentum, unless only the rate has one.
    pub momentum: Option<MomentumCycle>,
}

/// The momentum of [`OneCycle`]: it is Adam's and Lion's `beta1`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MomentumCycle {
    /// The momentum of the first step, and where the rate is highest.
    pub cycle_min_mom: f64,
    /// The momentum at both ends of the cycle.
    pub cycle_max_mom: f64,
    /// How fast the momentum grows after the cycle: times `1 + decay_mom_rate` for the first `decay_step_size` steps, and
    /// so on. Nothing keeps it below 1 but the length of the run.
    pub decay_mom_rate: f64,
}

impl Default for MomentumCycle {
    fn default() -> Self {
        Self { cycle_min_mom: 0.8, cycle_max_mom: 0.9, decay_mom_rate: 0.0 }
    }
}

impl OneCycle {
    /// A cycle between two rates, with DeepSpeed's defaults for everything else.
    pub fn new(cycle_min_lr: f64, cycle_max_lr: f64) -> Self {
        Self {
            cycle_min_lr,
            cycle_max_lr,
            decay_lr_rate: 0.0,
            cycle_first_step_size: 2000,
            cycle_second_step_size: None,
            cycle_first_stair_count: 0,
            cycle_second_stair_count: None,
            decay_step_size: 0,
            momentum: Some(MomentumCycle::default()),
        }
    }

    pub(super) fn lr(&self, done: u64) -> f64 {
        match self.decay_intervals(done) {
            None => self.cycle_min_lr + (self.cycle_max_lr - self.cycle_min_lr) * self.height(done),
            Some(intervals) => self.cycle_min_lr / (1.0 + self.decay_lr_rate * intervals),
        }
    }

    /// The momentum. That of the very first step is the minimum, though the cycle begins at the maximum: DeepSpeed sets
    /// it when it makes the scheduler.
    pub(super) fn momentum(&self, done: u64) -> Option<f64> {
        let MomentumCycle { cycle_min_mom: min, cycle_max_mom: max, decay_mom_rate } = self.momentum?;
        Some(match self.decay_intervals(done) {
            _ if done == 0 => min,
            None => max - (max - min) * self.height(done),
            Some(intervals) => max * (1.0 + decay_mom_rate * intervals),
        })
    }

    /// How long the decay has lasted, in units of `decay_step_size`; `None` during the cycle.
    fn decay_intervals(&self, done: u64) -> Option<f64> {
        let steps = done.checked_sub(self.total_steps()).filter(|steps| *steps > 0)?;
        Some(if self.decay_step_size == 0 { 0.0 } else { steps as f64 / self.decay_step_size as f64 })
    }

    fn total_steps(&self) -> u64 {
        self.first_steps().saturating_add(self.second_steps())
    }

    /// Never 0: a cycle without a way up is refused by `Schedule::validate`, and jumps if it comes here all the same.
    fn first_steps(&self) -> u64 {
        self.cycle_first_step_size.max(1)
    }

    fn second_steps(&self) -> u64 {
        self.cycle_second_step_size.unwrap_or(self.cycle_first_step_size)
    }

    /// Where between minimum (0) and maximum (1) the cycle is.
    fn height(&self, done: u64) -> f64 {
        let [first, second, total] =
            [self.first_steps(), self.second_steps(), self.total_steps()].map(|steps| steps as f64);
        let (ratio, turns) = (first / total, done as f64 / total);
        let phase = 1.0 + turns - (1.0 + turns).floor();
        let (smooth, stairs) = if phase <= ratio {
            (phase / ratio, self.cycle_first_stair_count)
        } else {
            let stairs = self.cycle_second_stair_count.unwrap_or(self.cycle_first_stair_count);
            ((phase - 1.0) / (ratio - 1.0), stairs)
        };
        if stairs == 0 {
            return smooth;
        }
        // From the whole step, because a smooth height just below a stair would fall a whole stair down.
        let (stairs, step) = (stairs as f64, done as f64 % total);
        let position = if step <= first { step * stairs / first } else { (total - step) * stairs / second };
        position.floor() / stairs
    }
}
