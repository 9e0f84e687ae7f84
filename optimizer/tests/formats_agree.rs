//! `split` is `fp32` in fewer bytes: the same masters, moments and weights, bit for bit, for any input at all.

mod common;

use common::{State, layout, noise};
use half::bf16;
use proptest::prelude::*;
use terrace_optimizer::{
    AdamW, Gradient, Optimizer, StateFormat, StateKind, StepArgs, WeightType, adamw, split,
};

/// Where rounding, encoding and arithmetic have their corners.
const CORNERS: [u32; 24] = [
    0x0000_0000, // zeros
    0x8000_0000,
    0x0000_0001, // the smallest subnormals
    0x8000_0001,
    0x0000_8000, // a tie between subnormals
    0x007f_ffff, // around the smallest normal
    0x0080_0000,
    0x3f80_0000, // one, the ties above an even and an odd bf16, and their neighbours
    0x3f80_7fff,
    0x3f80_8000,
    0x3f80_8001,
    0x3f81_8000,
    0xbf80_8000,
    0xbf81_8000,
    0x7f7f_7fff, // rounds to the largest finite bf16, to infinity, and is infinity
    0x7f7f_8000,
    0x7f7f_ffff,
    0xff7f_ffff,
    0x7f80_0000,
    0xff80_0000,
    0x7f80_0001, // NaNs: signalling, quiet, negative, all ones
    0x7fc0_0000,
    0xffc0_1234,
    0xffff_ffff,
];

fn any_float() -> impl Strategy<Value = f32> {
    prop_oneof![
        any::<u32>().prop_map(f32::from_bits),
        proptest::sample::select(&CORNERS[..]).prop_map(f32::from_bits),
        // Ties of every exponent and sign.
        any::<u16>().prop_map(|hi| f32::from_bits(u32::from(hi) << 16 | 0x8000)),
        -1.0f32..1.0,
    ]
}

fn any_config() -> impl Strategy<Value = (AdamW, f64, f32)> {
    let betas = (0.0..0.9999f64, 0.0..0.9999f64);
    // Others are refused.
    let any = any_float().prop_map(|x| if x.is_finite() { x.abs() } else { f32::MAX });
    let scale = prop_oneof![Just(1.0f32), 0.0..1.0f32, any];
    (betas, prop_oneof![Just(0.0), Just(1e-8), 0.0..1.0f64], 0.0..0.2f64, 0.0..0.1f64, scale).prop_map(
        |((beta1, beta2), eps, weight_decay, lr, scale)| {
            (AdamW { beta1, beta2, eps, weight_decay }, lr, scale)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn from_any_weights(
        weights in proptest::collection::vec(any_float(), 1..70),
        gradients in proptest::collection::vec(any_float(), 70),
        (config, lr, scale) in any_config(),
    ) {
        let mut pair = Pair::initialized(config, &weights);
        let gradient = &gradients[..weights.len()];
        for step in 1..=4 {
            let args = StepArgs { grad_scale: scale, ..config.step(step, lr) };
            pair.update(&args, gradient);
        }
    }

    #[test]
    fn from_any_state(
        masters in proptest::collection::vec(any_float(), 33),
        m in proptest::collection::vec(any_float(), 33),
        v in proptest::collection::vec(any_float(), 33),
        gradient in proptest::collection::vec(any_float(), 33),
        (config, lr, scale) in any_config(),
        step in 1..u64::MAX,
    ) {
        let mut pair = Pair::initialized(config, &masters);
        for state in [&mut pair.fp32, &mut pair.split] {
            state.set(StateKind::Moment1, &m);
            state.set(StateKind::Moment2, &v);
        }
        pair.update(&StepArgs { grad_scale: scale, ..config.step(step, lr) }, &gradient);
    }
}

#[test]
fn along_a_long_run() {
    let config = AdamW::default();
    let mut pair = Pair::initialized(config, &noise(3, 4099));
    for step in 1..=200 {
        pair.update(&config.step(step, 1e-2), &noise(step as u32, 4099));
    }
}

#[test]
fn ties_in_every_binade_survive_a_step_that_changes_nothing() {
    let weights: Vec<f32> = (0..=u16::MAX).map(|hi| f32::from_bits(u32::from(hi) << 16 | 0x8000)).collect();
    let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
    let mut pair = Pair::initialized(config, &weights);
    pair.update(&config.step(1, 0.0), &vec![0.0; weights.len()]);
    for (after, before) in pair.split.master().iter().zip(&weights) {
        assert_eq!(after.to_bits(), split::canonical(*before).to_bits());
    }
}

/// Shows that the comparison can fail: rounding ties to even loses a master whose remainder does not fit.
#[test]
#[should_panic(expected = "a tie was lost")]
fn canary_ties_to_even_would_be_caught() {
    let master = f32::from_bits(0x3f80_8000);
    let even = bf16::from_f32(master).to_bits();
    let restored = split::join(even, split::remainder(master));
    assert_eq!(restored, master, "a tie was lost");
}

/// The same parameters in both formats.
struct Pair {
    optimizers: [Box<dyn Optimizer>; 2],
    fp32: State,
    split: State,
}

impl Pair {
    fn initialized(config: AdamW, weights: &[f32]) -> Self {
        let optimizers = [StateFormat::Fp32, StateFormat::Split]
            .map(|format| adamw(config, layout(format, WeightType::Bf16)));
        let [fp32, split] = [&optimizers[0], &optimizers[1]].map(|o| State::initialized(o.as_ref(), weights));
        let pair = Self { optimizers, fp32, split };
        pair.assert_equal();
        pair
    }

    /// Updates both, alternating the gradient's type by step.
    fn update(&mut self, args: &StepArgs, gradient: &[f32]) {
        let narrow: Vec<bf16> = gradient.iter().map(|x| bf16::from_f32(*x)).collect();
        let gradient =
            if args.step.is_multiple_of(2) { Gradient::F32(gradient) } else { Gradient::Bf16(&narrow) };
        for (optimizer, state) in self.optimizers.iter().zip([&mut self.fp32, &mut self.split]) {
            optimizer.update(args, gradient, &mut state.slices()).expect("slices match the layout");
        }
        self.assert_equal();
    }

    fn assert_equal(&self) {
        assert_eq!(self.fp32.hash(), self.split.hash());
        assert_eq!(self.fp32.kind::<u16>(StateKind::Weight), self.split.kind::<u16>(StateKind::Weight));
        for (weight, master) in self.fp32.weight().iter().zip(self.fp32.master()) {
            assert_eq!(weight.is_nan(), master.is_nan(), "no finite or infinite master may round to NaN");
        }
    }
}
