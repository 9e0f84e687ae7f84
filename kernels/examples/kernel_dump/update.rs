//! Updates of training state with masters and moments in f32, and the norm of gradients.

use crate::Rig;
use crate::products::pairs;
use terrace_kernels::DType;
use terrace_kernels::update::{AdamFormat, AdamState, AdamStep};

const LR: f64 = 3e-3;
const BETA1: f64 = 0.9;
const BETA2: f64 = 0.999;
const EPS: f64 = 1e-8;
const DECAY: f64 = 0.1;

pub fn run(rig: &Rig) {
    let Some(kernels) = &rig.updates else {
        return;
    };
    let mixes = [
        (DType::F32, DType::F32),
        (DType::BF16, DType::F32),
        (DType::BF16, DType::BF16),
        (DType::F16, DType::F16),
    ];
    for (params, (dtype, of_gradient)) in pairs(&rig.sizes(&[100_003, 4096, 1], &[1000, 65]), &mixes) {
        for (step, decoupled) in [(1, true), (1000, true), (7, false)] {
            adam(rig, params, (dtype, of_gradient), step, decoupled);
        }
    }
    for (values, dtype) in pairs(&rig.sizes(&[300_001, 16_384, 5], &[20_000, 5]), &[DType::F32, DType::BF16])
    {
        let mut case = rig.case("sum_of_squares", format!("{values} {dtype}"));
        let gradient = case.operand("gradient", dtype, &[values], 0.1);
        let mut total = case.operand_of("total", DType::F64, &[1], &[1.5]);
        kernels.sum_of_squares.add(gradient.view(), total.view_mut()).expect("the sum runs");
        case.finish(&[("total", &total)]);
    }
}

/// Scalars by the formulas of terrace-optimizer, whose own are compared with torch's by its tests.
fn scalars(step: i32, decoupled: bool) -> AdamStep {
    AdamStep {
        grad_scale: 0.5,
        decay: if decoupled { 1.0 - LR * DECAY } else { DECAY } as f32,
        decoupled,
        lerp_from_gradient: false,
        lerp: (1.0 - BETA1) as f32,
        beta2: BETA2 as f32,
        beta2_rest: (1.0 - BETA2) as f32,
        bias2_sqrt_inverse: (1.0 / (1.0 - BETA2.powi(step)).sqrt()) as f32,
        eps: EPS as f32,
        step_size_negative: -(LR / (1.0 - BETA1.powi(step))) as f32,
        seed: 0,
    }
}

fn adam(rig: &Rig, params: usize, (dtype, of_gradient): (DType, DType), step: i32, decoupled: bool) {
    let kind = if decoupled { "adamw" } else { "adam" };
    let mut case = rig
        .case("adam", format!("{kind} {params} weights {dtype} gradient {of_gradient} step {step}"))
        .with("decoupled", decoupled)
        .with("step", step)
        .with("grad_scale", 0.5);
    for (key, value) in [("lr", LR), ("beta1", BETA1), ("beta2", BETA2), ("eps", EPS), ("decay", DECAY)] {
        case = case.with(key, value);
    }
    let gradient = case.operand("gradient", of_gradient, &[params], 0.3);
    // Moments of a first step are zeros, second ones are never negative.
    let of_moments = if step == 1 { 0.0 } else { 0.1 };
    let mut m = case.operand("m", DType::F32, &[params], of_moments);
    let squares: Vec<f32> = case
        .random_integers(1000, params)
        .iter()
        .map(|v| *v as f32 * 1e-2 * of_moments * of_moments)
        .collect();
    let mut v = case.operand_of("v", DType::F32, &[params], &squares);
    // Weights that have a master are only written.
    let mut master = case.operand("master", DType::F32, &[params], 1.0);
    let mut weight = case.result(dtype, &[params]);
    let rest_is_weight = dtype == DType::F32;
    let (of_weight, rest) = if rest_is_weight {
        (master.view_mut(), None)
    } else {
        (weight.view_mut(), Some(master.view_mut().into_bytes()))
    };
    let (of_m, of_v) = (m.view_mut().into_bytes(), v.view_mut().into_bytes());
    let state = AdamState { format: AdamFormat::Fp32, weight: of_weight, rest, m: of_m, v: of_v };
    let kernels = rig.updates.as_ref().expect("only cards update state here");
    kernels.adam.update(&scalars(step, decoupled), gradient.view(), state).expect("the update runs");
    let results = [("master", &master), ("m", &m), ("v", &v), ("weight", &weight)];
    case.finish(&results[..if rest_is_weight { 3 } else { 4 }]);
}
