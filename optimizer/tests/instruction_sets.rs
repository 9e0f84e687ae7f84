//! Every instruction set of this processor gives the same bits, for every layout, gradient type and size; and the norm those
//! that its definition says.

mod common;

use common::{Arrived, State, layouts, noise};
use half::{bf16, f16};
use proptest::prelude::*;
use terrace_optimizer::{AdamW, Gradient, Isa, NORM_BLOCK, StateLayout, StepArgs, SumOfSquares, adamw_on};

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
        scale in any::<u32>().prop_map(f32::from_bits).prop_map(|x| if x.is_finite() { x.abs() } else { f32::MAX }),
    ) {
        for layout in layouts() {
            agree(layout, &weights, &gradient[..weights.len()], scale, 3);
        }
    }
}

#[test]
fn norms_agree_at_every_length() {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let block = [NORM_BLOCK - 1, NORM_BLOCK, NORM_BLOCK + 1, 2 * NORM_BLOCK, 5 * NORM_BLOCK + 4321];
    for length in (0..=70).chain([127, 128, 1000, 1024]).chain(block) {
        for gradient_type in ["f32", "bf16", "f16"] {
            // Magnitudes over twelve binades, so that the order shows.
            let spread = |(i, x): (usize, f32)| x * 2f32.powi(-((i * 7 % 13) as i32));
            let values = noise(length as u32, length).into_iter().enumerate().map(spread).collect();
            let gradient = Arrived::new(gradient_type, values);
            let gradient = gradient.gradient();
            let expected = defined_sum(gradient).to_bits();
            for isa in Isa::available() {
                let mut sum = SumOfSquares::new();
                sum.add_on(isa, gradient);
                assert_eq!(sum.total().to_bits(), expected, "{isa} {gradient_type} {length}");
            }
            let mut sum = SumOfSquares::new();
            sum.add_threaded(&pool, &[gradient]);
            assert_eq!(sum.total().to_bits(), expected, "{gradient_type} {length} on threads");
        }
    }
}

/// The sum of squares as the documentation of its module says it.
fn defined_sum(gradient: Gradient<'_>) -> f64 {
    let values: Vec<f64> = match gradient {
        Gradient::Bf16(values) => values.iter().map(|x| x.to_f64()).collect(),
        Gradient::F16(values) => values.iter().map(|x| x.to_f64()).collect(),
        Gradient::F32(values) => values.iter().map(|x| f64::from(*x)).collect(),
    };
    let mut total = 0.0;
    for block in values.chunks(NORM_BLOCK) {
        let lane = |lane: usize| block.iter().skip(lane).step_by(8).fold(0.0, |sum, x| sum + x * x);
        let [a, b, c, d, e, f, g, h] = std::array::from_fn(lane);
        total += ((a + e) + (c + g)) + ((b + f) + (d + h));
    }
    total
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
