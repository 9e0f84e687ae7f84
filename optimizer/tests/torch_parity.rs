//! AdamW and clipping give the numbers of torch.
//!
//! The fixtures come from `fixtures/make_fixtures.py`.

mod common;

use common::fixtures::{Path, array, bits, fixture, floats, number};
use common::{Reference, State, lossless_layouts, noise};
use serde_json::Value;
use terrace_optimizer::{
    AdamW, Gradient, StateFormat, StateKind, StateLayout, StepArgs, WeightType, adamw, clip_coefficient,
};

const STEPS: u64 = 100;

/// torch's kernels for CPUs without fused multiply-add round as ours do, except that its square root comes from MKL and is
/// an ulp off one time in six. It enters the weights only.
#[test]
fn moments_are_bit_identical_to_torch_on_baseline_cpus() {
    let fixture = fixture("adamw.json");
    let mut checked = 0;
    for case in array(&fixture["baseline"]) {
        let case = Case::new(&fixture, case);
        for layout in lossless_layouts() {
            let ours = case.run(layout);
            ours.weight.close(&case.weight, &case.name);
            assert_eq!(bits(&ours.moment1.last), bits(&case.moment1), "{}: moment1", case.name);
            assert_eq!(bits(&ours.moment2.last), bits(&case.moment2), "{}: moment2", case.name);
            checked += 1;
        }
    }
    assert_eq!(checked, 4 * 4 * 3 * 4, "configurations × sizes × recorded steps × layouts");
}

/// torch's AVX2 and AVX-512 kernels fuse, so the moments differ in the last bits too.
#[test]
fn within_1e_6_of_torch_on_modern_cpus() {
    let fixture = fixture("adamw.json");
    for case in array(&fixture["native"]) {
        let case = Case::new(&fixture, case);
        let ours = case.run(StateLayout::new(StateFormat::Fp32, WeightType::F32).unwrap());
        ours.weight.close(&case.weight, &case.name);
        ours.moment1.close(&case.moment1, &case.name);
        ours.moment2.close(&case.moment2, &case.name);
    }
}

/// The reference shares no code with the loops: it is the formula of the paper in f64.
#[test]
fn follows_the_formula_in_f64() {
    let config = AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.05 };
    let weights = noise(7, 1000);
    let mut reference = Reference::new(&weights);
    let optimizer = adamw(config, StateLayout::new(StateFormat::Fp32, WeightType::F32).unwrap());
    let mut state = State::initialized(optimizer.as_ref(), &weights);
    for step in 1..=STEPS {
        let gradient = noise(step as u32, weights.len());
        let args = StepArgs { grad_scale: 0.7, ..config.step(step, 1e-3) };
        reference.update(&config, &args, &gradient);
        optimizer.update(&args, Gradient::F32(&gradient), &mut state.slices()).unwrap();
    }
    for (ours, exact) in state.master().iter().zip(&reference.p) {
        assert!((f64::from(*ours) - exact).abs() < 2e-6, "{ours} {exact}");
    }
}

#[test]
fn clips_like_clip_grad_norm() {
    for case in array(&fixture("adamw.json")["clip_coefficients"]) {
        let ours = clip_coefficient(number(&case["norm"]), number(&case["max_norm"]));
        let torch = number(&case["coefficient"]);
        assert!((f64::from(ours) - torch).abs() <= 3e-7 * torch, "{case}: {ours}");
    }
}

/// One recorded trajectory: its configuration and the state after `step` steps.
struct Case {
    name: String,
    config: AdamW,
    lr: f64,
    grad_scale: f32,
    size: usize,
    step: u64,
    weight: Vec<f32>,
    moment1: Vec<f32>,
    moment2: Vec<f32>,
}

impl Case {
    fn new(fixture: &Value, case: &Value) -> Self {
        let of_config = |c: &&Value| c["name"] == case["config"];
        let config =
            array(&fixture["configs"]).iter().find(of_config).expect("every case names a configuration");
        let field = |name: &str| number(&config[name]);
        let (size, step) = (case["size"].as_u64().unwrap() as usize, case["step"].as_u64().unwrap());
        Self {
            name: format!("{} size {size} step {step}", config["name"]),
            config: AdamW {
                beta1: field("beta1"),
                beta2: field("beta2"),
                eps: field("eps"),
                weight_decay: field("weight_decay"),
            },
            lr: field("lr"),
            grad_scale: field("grad_scale") as f32,
            size,
            step,
            weight: floats(&case["weight"]),
            moment1: floats(&case["moment1"]),
            moment2: floats(&case["moment2"]),
        }
    }

    fn run(&self, layout: StateLayout) -> Trajectory {
        let optimizer = adamw(self.config, layout);
        let mut state = State::initialized(optimizer.as_ref(), &noise(self.size as u32, self.size));
        let mut trajectory = Trajectory::default();
        trajectory.weight.push(&state.master());
        for step in 1..=self.step {
            let gradient = noise(1000 * step as u32 + self.size as u32, self.size);
            let args = StepArgs { grad_scale: self.grad_scale, ..self.config.step(step, self.lr) };
            optimizer.update(&args, Gradient::F32(&gradient), &mut state.slices()).unwrap();
            trajectory.weight.push(&state.master());
            trajectory.moment1.push(state.kind(StateKind::Moment1));
            trajectory.moment2.push(state.kind(StateKind::Moment2));
        }
        trajectory
    }
}

#[derive(Default)]
struct Trajectory {
    weight: Path,
    moment1: Path,
    moment2: Path,
}
