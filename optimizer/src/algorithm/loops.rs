//! An algorithm over one layout, on one instruction set.

use super::Elementwise;
use crate::error::Result;
use crate::isa::Isa;
use crate::layout::StateLayout;
use crate::store::{self, Noise};
use crate::update::{Gradient, Optimizer, StepArgs};

/// `layout` has the moments of `algorithm`.
pub(super) struct Loops<A> {
    pub(super) isa: Isa,
    pub(super) algorithm: A,
    pub(super) layout: StateLayout,
}

impl<A: Elementwise> Optimizer for Loops<A> {
    fn layout(&self) -> &StateLayout {
        &self.layout
    }

    fn update(&self, args: &StepArgs, gradient: Gradient<'_>, state: &mut [&mut [u8]]) -> Result<()> {
        let rule = self.algorithm.rule(args)?;
        self.layout.check(gradient.len(), state)?;
        store::update(self.isa, &self.layout, rule, Noise::seed(args.step), gradient, state);
        Ok(())
    }

    fn initialize(&self, weights: &[f32], state: &mut [&mut [u8]]) -> Result<()> {
        self.layout.check(weights.len(), state)?;
        store::initialize(&self.layout, weights, self.algorithm.initial_moment(), state);
        Ok(())
    }
}
