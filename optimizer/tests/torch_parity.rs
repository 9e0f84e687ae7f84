//! AdamW and clipping give the numbers of torch.
//!
//! The fixtures come from `fixtures/make_fixtures.py`.

mod common;

use common::fixtures::{Path, Recorded, array, fixture, number};
use common::{Arrived, State, layout, lossless_layouts, noise};
use serde_json::Value;
use terrace_optimizer::{
    AdamW, StateFormat, StateKind, StateLayout, StepArgs, WeightType, adamw, clip_coefficient,
};

/// Of this size there is one configuration, compared in one layout.
const LARGEST: usize = (1 << 20) + 3;

/// torch's kernels for CPUs without fused multiply-add round as ours do, except that its square root comes from MKL and is
/// an ulp off one time in six. It enters the weights only.
#[test]
fn moments_are_bit_identical_to_torch_on_baseline_cpus() {
    let fixture = fixture("adamw.json");
    let mut checked = 0;
    for case in cases(&fixture, "baseline").filter(|case| case.size < LARGEST) {
        for layout in lossless_layouts() {
            case.run(layout).has_the_moments_of(&case);
            checked += 1;
        }
    }
    // Sizes × recorded steps, and two narrow types of gradients.
    assert_eq!(checked, 4 * 4 * (6 * 3 + 2), "configurations × layouts × what is recorded of each");
}

/// torch's AVX2 and AVX-512 kernels fuse, so the moments differ in the last bits too.
#[test]
fn within_1e_6_of_torch_on_modern_cpus() {
    let fixture = fixture("adamw.json");
    for case in cases(&fixture, "native").filter(|case| case.size < LARGEST) {
        case.run(layout(StateFormat::Fp32, WeightType::F32)).is_close_to(&case);
    }
}

/// Both of the above, of one run for each type of gradient.
#[test]
fn a_million_parameters_and_three() {
    let fixture = fixture("adamw.json");
    let largest = |case: &Case| case.size == LARGEST;
    let natives = cases(&fixture, "native").filter(largest);
    let mut checked = Vec::new();
    for (baseline, native) in cases(&fixture, "baseline").filter(largest).zip(natives) {
        assert_eq!(baseline.name, native.name);
        let ours = baseline.run(layout(StateFormat::Fp32, WeightType::F32));
        ours.has_the_moments_of(&baseline);
        ours.is_close_to(&native);
        checked.push(baseline.gradient_type);
    }
    assert_eq!(checked, ["f32", "bf16", "f16"]);
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
    gradient_type: String,
    size: usize,
    step: u64,
    weight: Recorded,
    moment1: Recorded,
    moment2: Recorded,
}

/// Those made with the kernels of that name.
fn cases<'a>(fixture: &'a Value, kernels: &str) -> impl Iterator<Item = Case> + use<'a> {
    array(&fixture[kernels]).iter().map(|case| Case::new(fixture, case))
}

impl Case {
    fn new(fixture: &Value, case: &Value) -> Self {
        let of_config = |c: &&Value| c["name"] == case["config"];
        let config =
            array(&fixture["configs"]).iter().find(of_config).expect("every case names a configuration");
        let field = |name: &str| number(&config[name]);
        let (size, step) = (case["size"].as_u64().unwrap() as usize, case["step"].as_u64().unwrap());
        let gradient_type = case.get("gradient").map_or("f32", |name| name.as_str().unwrap());
        let recorded = |name: &str| Recorded::new(case, name).expect("every case has weights and moments");
        Self {
            name: format!("{} size {size} step {step} {gradient_type} gradient", config["name"]),
            config: AdamW {
                beta1: field("beta1"),
                beta2: field("beta2"),
                eps: field("eps"),
                weight_decay: field("weight_decay"),
            },
            lr: field("lr"),
            grad_scale: field("grad_scale") as f32,
            gradient_type: gradient_type.to_owned(),
            size,
            step,
            weight: recorded("weight"),
            moment1: recorded("moment1"),
            moment2: recorded("moment2"),
        }
    }

    fn run(&self, layout: StateLayout) -> Trajectory {
        let optimizer = adamw(self.config, layout);
        let mut state = State::initialized(optimizer.as_ref(), &noise(self.size as u32, self.size));
        let mut trajectory = Trajectory::default();
        trajectory.weight.push(&state.master());
        for step in 1..=self.step {
            let gradient = noise(1000 * step as u32 + self.size as u32, self.size);
            let gradient = Arrived::new(&self.gradient_type, gradient);
            let args = StepArgs { grad_scale: self.grad_scale, ..self.config.step(step, self.lr) };
            optimizer.update(&args, gradient.gradient(), &mut state.slices()).unwrap();
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

impl Trajectory {
    fn has_the_moments_of(&self, case: &Case) {
        self.weight.close(&case.weight, &format!("{}: weight", case.name));
        self.moment1.same_bits(&case.moment1, &format!("{}: moment1", case.name));
        self.moment2.same_bits(&case.moment2, &format!("{}: moment2", case.name));
    }

    fn is_close_to(&self, case: &Case) {
        self.weight.close(&case.weight, &format!("{}: weight", case.name));
        self.moment1.close(&case.moment1, &format!("{}: moment1", case.name));
        self.moment2.close(&case.moment2, &format!("{}: moment2", case.name));
    }
}
