//! The loops that run a [`Rule`] over the bytes of a chunk.

use bytemuck::cast_slice_mut;

use super::{Elementwise, Rule};
use crate::error::Result;
use crate::layout::{StateFormat, StateLayout, WeightType};
use crate::split::{canonical, join, remainder, round_bf16};
use crate::update::{Gradient, Optimizer, StepArgs};
use crate::widen::Widen;

/// An element-wise algorithm with `N` moments over one layout.
pub(super) struct Loops<A, const N: usize> {
    algorithm: A,
    layout: StateLayout,
}

impl<A: Elementwise<N>, const N: usize> Loops<A, N> {
    /// `layout` has `N` moments and a format with a loop: [`optimizer`](super::optimizer) saw to it.
    pub(super) fn new(algorithm: A, layout: StateLayout) -> Self {
        Self { algorithm, layout }
    }

    /// Dispatches to the loop of the layout. `state` has passed [`StateLayout::check`], so the casts cannot fail.
    fn update_from<G: Widen>(&self, rule: &A::Scalars, gradient: &[G], state: &mut [&mut [u8]]) {
        match (self.layout.format(), self.layout.weight(), state) {
            (StateFormat::Fp32, WeightType::F32, [weight, moments @ ..]) => {
                update_f32(rule, gradient, cast_slice_mut(weight), floats(moments));
            }
            (StateFormat::Fp32, WeightType::Bf16, [weight, master, moments @ ..]) => {
                let (weight, master) = (cast_slice_mut(weight), cast_slice_mut(master));
                update_fp32(rule, gradient, weight, master, floats(moments));
            }
            (StateFormat::Split, _, [weight, low, moments @ ..]) => {
                let (weight, low) = (cast_slice_mut(weight), cast_slice_mut(low));
                update_split(rule, gradient, weight, low, floats(moments));
            }
            _ => unreachable!("{NO_LOOP}"),
        }
    }
}

impl<A: Elementwise<N>, const N: usize> Optimizer for Loops<A, N> {
    fn layout(&self) -> &StateLayout {
        &self.layout
    }

    fn update(&self, args: &StepArgs, gradient: Gradient<'_>, state: &mut [&mut [u8]]) -> Result<()> {
        let rule = self.algorithm.scalars(args)?;
        self.layout.check(gradient.len(), state)?;
        match gradient {
            Gradient::Bf16(values) => self.update_from(&rule, values, state),
            Gradient::F16(values) => self.update_from(&rule, values, state),
            Gradient::F32(values) => self.update_from(&rule, values, state),
        }
        Ok(())
    }

    fn initialize(&self, weights: &[f32], state: &mut [&mut [u8]]) -> Result<()> {
        self.layout.check(weights.len(), state)?;
        let master = weights.iter().map(|weight| canonical(*weight));
        let moments = match (self.layout.format(), self.layout.weight(), state) {
            (StateFormat::Fp32, WeightType::F32, [weight, moments @ ..]) => {
                fill(cast_slice_mut(weight), master);
                moments
            }
            (StateFormat::Fp32, WeightType::Bf16, [weight, full, moments @ ..]) => {
                fill(cast_slice_mut(weight), master.clone().map(round_bf16));
                fill(cast_slice_mut(full), master);
                moments
            }
            (StateFormat::Split, _, [weight, low, moments @ ..]) => {
                fill(cast_slice_mut(weight), master.clone().map(round_bf16));
                fill(cast_slice_mut(low), master.map(remainder));
                moments
            }
            _ => unreachable!("{NO_LOOP}"),
        };
        for moment in floats::<N>(moments) {
            moment.fill(self.algorithm.initial_moment());
        }
        Ok(())
    }
}

/// f32 weights: the weight is the master.
fn update_f32<G: Widen, R: Rule<N>, const N: usize>(
    rule: &R,
    gradient: &[G],
    weight: &mut [f32],
    moments: [&mut [f32]; N],
) {
    let n = gradient.len();
    let (weight, mut moments) = (&mut weight[..n], moments.map(|moment| &mut moment[..n]));
    for i in 0..n {
        let new;
        (weight[i], new) = rule.apply(gradient[i].widen(), weight[i], at(&moments, i));
        put(&mut moments, i, new);
    }
}

/// f32 master, and the bf16 weight rounded from it in the same pass.
fn update_fp32<G: Widen, R: Rule<N>, const N: usize>(
    rule: &R,
    gradient: &[G],
    weight: &mut [u16],
    master: &mut [f32],
    moments: [&mut [f32]; N],
) {
    let n = gradient.len();
    let (weight, master) = (&mut weight[..n], &mut master[..n]);
    let mut moments = moments.map(|moment| &mut moment[..n]);
    for i in 0..n {
        let new;
        (master[i], new) = rule.apply(gradient[i].widen(), master[i], at(&moments, i));
        weight[i] = round_bf16(master[i]);
        put(&mut moments, i, new);
    }
}

/// The master is the bf16 weight and its remainder.
fn update_split<G: Widen, R: Rule<N>, const N: usize>(
    rule: &R,
    gradient: &[G],
    weight: &mut [u16],
    low: &mut [i16],
    moments: [&mut [f32]; N],
) {
    let n = gradient.len();
    let (weight, low) = (&mut weight[..n], &mut low[..n]);
    let mut moments = moments.map(|moment| &mut moment[..n]);
    for i in 0..n {
        let (master, new) = rule.apply(gradient[i].widen(), join(weight[i], low[i]), at(&moments, i));
        weight[i] = round_bf16(master);
        low[i] = remainder(master);
        put(&mut moments, i, new);
    }
}

#[inline(always)]
fn at<const N: usize>(moments: &[&mut [f32]; N], i: usize) -> [f32; N] {
    std::array::from_fn(|k| moments[k][i])
}

#[inline(always)]
fn put<const N: usize>(moments: &mut [&mut [f32]; N], i: usize, values: [f32; N]) {
    for (moment, value) in moments.iter_mut().zip(values) {
        moment[i] = value;
    }
}

fn floats<'a, const N: usize>(moments: &'a mut [&mut [u8]]) -> [&'a mut [f32]; N] {
    let moments: &mut [&mut [u8]; N] = moments.try_into().expect(NO_LOOP);
    moments.each_mut().map(|moment| cast_slice_mut(moment))
}

fn fill<T>(slots: &mut [T], values: impl Iterator<Item = T>) {
    slots.iter_mut().zip(values).for_each(|(slot, value)| *slot = value);
}

const NO_LOOP: &str = "`optimizer` refuses formats without a loop and other moments, and StateLayout::check other numbers of slices";
