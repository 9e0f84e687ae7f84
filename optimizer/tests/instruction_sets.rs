//! Every instruction set of this processor gives the same bits, for every layout, gradient type and size.

mod common;

use common::{State, layouts, noise};
use half::{bf16, f16};
use proptest::prelude::*;
use terrace_optimizer::{AdamW, Gradient, Isa, StateLayout, StepArgs, adamw_on};

/// Around the tile and the vector widths, and a few tiles.
const SIZES: [usize; 12] = [1, 7, 22, 31, 32, 33, 63, 64, 127, 128, 1024, 65536 + 3];

#[test]
fn agree_at_every_size() {
    for size in SIZES {
        let (weights, gradient) = (noise(8, size), noise(9, size));
        for layout in layouts() {
            for steps in [1, 3] {
                agree(layout, &weights, &gradient, 1.0, steps);
            }
        }
    }
}

proptest! {
    #[test]
    fn agree_on_any_input(
        weights in proptest::collection::vec(any::<u32>().prop_map(f32::from_bits), 1..100),
        gradient in proptest::collection::vec(any::<u32>().prop_map(f32::from_bits), 100),
        scale in any::<u32>().prop_map(f32::from_bits),
    ) {
        for layout in layouts() {
            agree(layout, &weights, &gradient[..weights.len()], scale, 3);
        }
    }
}

/// The comparison sees the last bit of one gradient.
#[test]
#[should_panic(expected = "differs")]
fn canary_a_different_gradient_is_seen() {
    let (weights, gradient) = (noise(8, 100), noise(9, 100));
    let mut other = gradient.clone();
    other[99] = f32::from_bits(other[99].to_bits() ^ 0x10000);
    let layout = layouts()[2];
    let of = |gradient: &[f32]| states(Isa::best(), layout, &weights, gradient, 1.0, 2);
    assert!(of(&gradient) == of(&other), "differs");
}

fn agree(layout: StateLayout, weights: &[f32], gradient: &[f32], scale: f32, steps: u64) {
    let mut isas = Isa::available();
    let baseline = isas.next().expect("the baseline is always there");
    let expected = states(baseline, layout, weights, gradient, scale, steps);
    for isa in isas {
        let found = states(isa, layout, weights, gradient, scale, steps);
        assert!(found == expected, "{isa} {layout:?} {} parameters, {steps} steps", weights.len());
    }
}

/// The bytes of the state after `steps` steps with the gradient in each type.
fn states(
    isa: Isa,
    layout: StateLayout,
    weights: &[f32],
    gradient: &[f32],
    scale: f32,
    steps: u64,
) -> Vec<Vec<u8>> {
    let config = AdamW::default();
    let optimizer = adamw_on(isa, config, layout);
    let narrow: Vec<bf16> = gradient.iter().map(|x| bf16::from_f32(*x)).collect();
    let half: Vec<f16> = gradient.iter().map(|x| f16::from_f32(*x)).collect();
    let run = |gradient| {
        let mut state = State::initialized(optimizer.as_ref(), weights);
        for step in 1..=steps {
            let args = StepArgs { grad_scale: scale, ..config.step(step, 1e-3) };
            optimizer.update(&args, gradient, &mut state.slices()).expect("slices match the layout");
        }
        state.bytes()
    };
    [Gradient::Bf16(&narrow), Gradient::F16(&half), Gradient::F32(gradient)].map(run).to_vec()
}
