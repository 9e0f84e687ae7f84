//! Runs: consecutive parameters of a flat group that get the same learning rate and weight decay.
//!
//! Rules speak of parameters by name, updates take slices of a group. The two meet here, once, when the engine is built: every
//! group is cut into runs, and the update of a chunk becomes one update for each run that lies in it. A run begins where a
//! parameter does, at a multiple of [`PARAM_ALIGN`](crate::network::PARAM_ALIGN) elements, so no block of any state format is
//! ever cut; padding goes with the parameter before it. Updates are element-wise, so the cut changes no bits.

use crate::network::Network;
use crate::{EngineError, Result, TrainingConfig};
use std::ops::Range;
use terrace_optimizer::{OptimizerError, ParamGroups, StepArgs};

/// What the parameters of a run get.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    lr_scale: f64,
    weight_decay: f64,
    /// Neither read by the norm nor written by the update.
    pub(crate) frozen: bool,
}

/// Consecutive elements of a group that get the same.
#[derive(Debug, Clone, PartialEq)]
struct Run {
    elements: Range<usize>,
    rates: Rates,
}

/// The runs of every group.
#[derive(Debug, Clone, Default)]
pub(crate) struct Runs {
    groups: Vec<Vec<Run>>,
}

impl Rates {
    /// The arguments of a step for these parameters.
    pub(crate) fn args(&self, step: &StepArgs) -> StepArgs {
        StepArgs { lr: step.lr * self.lr_scale, weight_decay: self.weight_decay, ..*step }
    }
}

impl Runs {
    /// Resolves the rules for every parameter of the network.
    pub(crate) fn new(network: &Network, training: &TrainingConfig) -> Result<Self> {
        let rules = training.groups.clone();
        let rules = ParamGroups { rules, weight_decay: training.optimizer.weight_decay() };
        let describe = |e: OptimizerError| EngineError::Config(e.to_string());
        let names = network.groups.iter().flat_map(|g| &g.params).map(|p| p.spec.name.as_str());
        rules.check(names).map_err(describe)?;
        let groups = network.groups.iter().map(|group| {
            let mut runs: Vec<Run> = Vec::new();
            for param in &group.params {
                let found = rules.resolve(&param.spec.name, training.base_lr).map_err(describe)?;
                let rates = Rates {
                    lr_scale: found.lr_scale,
                    weight_decay: found.weight_decay,
                    frozen: found.frozen,
                };
                match runs.last_mut() {
                    Some(last) if last.rates == rates => {}
                    Some(last) => {
                        last.elements.end = param.offset;
                        runs.push(Run { elements: param.offset..group.elements, rates });
                    }
                    None => runs.push(Run { elements: 0..group.elements, rates }),
                }
            }
            Ok(runs)
        });
        Ok(Self { groups: groups.collect::<Result<_>>()? })
    }

    /// Whether some parameter is never updated.
    pub(crate) fn any_frozen(&self) -> bool {
        self.groups.iter().flatten().any(|run| run.rates.frozen)
    }

    /// The frozen elements of a group.
    pub(crate) fn frozen(&self, group: usize) -> impl Iterator<Item = Range<usize>> + '_ {
        self.groups[group].iter().filter(|run| run.rates.frozen).map(|run| run.elements.clone())
    }

    /// The runs that make up `elements` of a group, in order: how many elements each has there, and what they get.
    pub(crate) fn within(
        &self,
        group: usize,
        elements: Range<usize>,
    ) -> impl Iterator<Item = (usize, Rates)> + '_ {
        let runs = &self.groups[group];
        let first = runs.partition_point(|run| run.elements.end <= elements.start);
        runs[first..].iter().take_while(move |run| run.elements.start < elements.end).map(move |run| {
            let (start, end) = (run.elements.start.max(elements.start), run.elements.end.min(elements.end));
            (end - start, run.rates)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(ends: &[usize]) -> Runs {
        let mut start = 0;
        let group = ends.iter().enumerate().map(|(index, &end)| {
            let rates = Rates { lr_scale: index as f64, weight_decay: 0.0, frozen: index == 1 };
            Run { elements: std::mem::replace(&mut start, end)..end, rates }
        });
        Runs { groups: vec![Vec::new(), group.collect()] }
    }

    #[test]
    fn chunks_are_covered_without_gaps() {
        let runs = runs(&[64, 192, 4096]);
        let within = |elements: Range<usize>| -> Vec<(usize, f64)> {
            runs.within(1, elements).map(|(len, rates)| (len, rates.lr_scale)).collect()
        };
        assert_eq!(within(0..4096), [(64, 0.0), (128, 1.0), (3904, 2.0)]);
        assert_eq!(within(0..64), [(64, 0.0)]);
        assert_eq!(within(64..128), [(64, 1.0)]);
        assert_eq!(within(128..256), [(64, 1.0), (64, 2.0)]);
        assert_eq!(within(4032..4096), [(64, 2.0)]);
        assert!(runs.any_frozen());
        assert!(runs.frozen(1).eq(std::iter::once(64..192)));
        assert_eq!((runs.frozen(0).count(), runs.within(0, 0..0).count()), (0, 0));
    }

    #[test]
    fn a_run_scales_the_rate_of_the_step() {
        let step = StepArgs { step: 3, lr: 0.5, grad_scale: 0.25, weight_decay: 9.0 };
        let rates = Rates { lr_scale: 0.5, weight_decay: 0.1, frozen: false };
        assert_eq!(rates.args(&step), StepArgs { lr: 0.25, weight_decay: 0.1, ..step });
    }
}
