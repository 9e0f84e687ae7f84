//! Adam with L2, Adagrad, Lion and SGD give torch's numbers in every format with a loop, however they are cut up.
//!
//! The fixtures come from `fixtures/make_algorithms.py` and `fixtures/make_lion.py`. What is bit-identical in the first, with
//! torch's kernels for CPUs without fused multiply-add: everything of Lion and SGD; the moments of Adam and Adagrad without
//! decay. Their weights, and their moments with decay (which contain the weight), are within 1e-6, because of torch's square
//! root.

mod common;

use std::collections::BTreeMap;

use common::fixtures::{Path, Recorded, array, bits, fixture, number};
use common::{State, algorithms, every_layout, moments, noise};
use half::bf16;
use serde_json::Value;
use terrace_optimizer::{
    Adagrad, Adam, AdamW, Algorithm, COMPACT_BLOCK, Gradient, Isa, Lion, Optimizer, OptimizerError, Sgd,
    StateFormat, StateKind, StateLayout, StepArgs, THREAD_CHUNK, WeightType, adamw, clip_coefficient,
    optimizer, optimizer_on, split, update_threaded,
};

#[test]
fn bits_of_torch_on_baseline_cpus() {
    let fixture = fixture("algorithms.json");
    let (mut exact, mut checked) = (0, 0);
    for case in array(&fixture["baseline"]) {
        let case = Case::new(&fixture, case);
        for layout in layouts(&case.algorithm) {
            let ours = case.run(layout);
            for (kind, theirs) in &case.recorded {
                let path = &ours[kind];
                path.close(theirs, &format!("{} {kind}", case.name));
                if case.is_exact(*kind) {
                    path.same_bits(theirs, &format!("{} {kind}", case.name));
                    exact += 1;
                }
                checked += 1;
            }
        }
    }
    let per_configuration = 4 * 2 * 4; // sizes × recorded steps × layouts
    let arrays = 2 * 3 + 2 * 2 + 2 * 2 + 1 + 3 * 2; // Adam, Adagrad, Lion, SGD without and with momentum
    assert_eq!(checked, arrays * per_configuration);
    assert_eq!(exact, (2 + 1 + 2 * 2 + 1 + 3 * 2) * per_configuration);
}

#[test]
fn within_1e_6_of_torch_on_modern_cpus() {
    let fixture = fixture("algorithms.json");
    for case in array(&fixture["native"]) {
        let case = Case::new(&fixture, case);
        let [layout, ..] = layouts(&case.algorithm);
        let ours = case.run(layout);
        for (kind, theirs) in &case.recorded {
            ours[kind].close(theirs, &format!("{} {kind}", case.name));
        }
    }
}

/// DeepSpeed's kernel fuses multiply and add and computes `1 − β` in f32. The differences are millionths after 100 steps,
/// because the same rate is added again and again and rounds the same way for as long as a weight stays in its binade. A
/// direction taken differently even once would show: the smallest rate here is 1e-4.
#[test]
fn lion_stays_with_deepspeeds_kernel() {
    let fixture = fixture("lion.json");
    let cases = array(&fixture["deepspeed"]);
    assert_eq!(cases.len(), 4);
    for case in cases {
        let case = Case::new(&fixture, case);
        let [layout, ..] = layouts(&case.algorithm);
        let ours = case.run(layout);
        for (kind, theirs) in &case.recorded {
            ours[kind].within(1e-5, theirs, &format!("{} {kind}", case.name));
        }
    }
}

#[test]
fn adam_without_decay_is_adamw_without_decay() {
    let layout = StateLayout::new(StateFormat::Split, WeightType::Bf16).unwrap();
    let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
    let optimizers = [
        adamw(config, layout),
        optimizer(Algorithm::AdamW(config), layout).unwrap(),
        optimizer(Algorithm::Adam(Adam::default()), layout).unwrap(),
    ];
    let [plain, chosen, adam] = optimizers.map(|optimizer| {
        let mut state = State::initialized(optimizer.as_ref(), &noise(3, 1001));
        for step in 1..=20 {
            let gradient = noise(step as u32, 1001);
            optimizer
                .update(&config.step(step, 1e-2), Gradient::F32(&gradient), &mut state.slices())
                .unwrap();
        }
        state
    });
    assert_eq!(plain, chosen);
    assert_eq!(plain, adam);
}

#[test]
fn chunks_and_threads_change_nothing() {
    const PARAMS: usize = 2 * THREAD_CHUNK + 777;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let gradient: Vec<bf16> = noise(5, PARAMS).iter().map(|x| bf16::from_f32(*x)).collect();
    for algorithm in algorithms() {
        for layout in every_layout(&algorithm) {
            let optimizer = optimizer(algorithm, layout).unwrap();
            let mut whole = State::initialized(optimizer.as_ref(), &noise(4, PARAMS));
            let (mut threaded, mut cut) = (whole.clone(), whole.clone());
            let args = algorithm.step(1, 1e-3);
            optimizer.update(&args, Gradient::Bf16(&gradient), &mut whole.slices()).unwrap();
            let slices = &mut threaded.slices();
            update_threaded(optimizer.as_ref(), &pool, &args, Gradient::Bf16(&gradient), slices).unwrap();
            assert_eq!(threaded, whole, "{algorithm} {layout:?} on threads");
            update_in_chunks(optimizer.as_ref(), &args, &gradient, &mut cut);
            assert_eq!(cut, whole, "{algorithm} {layout:?} in chunks");
        }
    }
}

/// Infinities, NaNs, subnormals and ties of every kind come up among 16 thousand random patterns.
#[test]
fn formats_agree_on_any_bits_at_all() {
    const PARAMS: usize = 1 << 14;
    let [weights, moment1, moment2, gradient] = [1, 2, 3, 4].map(|seed| any_floats(seed, PARAMS));
    assert!(weights.iter().any(|x| x.is_nan()) && gradient.iter().any(|x| x.is_subnormal()));
    for algorithm in algorithms() {
        let states = layouts(&algorithm).map(|layout| {
            let optimizer = optimizer(algorithm, layout).unwrap();
            let mut state = State::initialized(optimizer.as_ref(), &weights);
            for kind in moments(&algorithm) {
                state.set(*kind, if *kind == StateKind::Moment1 { &moment1 } else { &moment2 });
            }
            let args = algorithm.step(3, 1e-2);
            optimizer.update(&args, Gradient::F32(&gradient), &mut state.slices()).unwrap();
            state
        });
        let [reference, others @ ..] = &states;
        for other in others {
            assert_eq!(bits(&other.master()), bits(&reference.master()), "{algorithm}: masters");
            for kind in moments(&algorithm) {
                let [ours, theirs] = [other, reference].map(|state| state.kind::<u32>(*kind));
                assert_eq!(ours, theirs, "{algorithm}: {kind}");
                assert!(ours.iter().all(|x| !f32::from_bits(*x).is_nan() || *x == split::CANONICAL_NAN));
            }
            let narrow = other.weight();
            assert!(
                narrow.iter().zip(other.master()).all(|(weight, master)| weight.is_nan() == master.is_nan())
            );
        }
    }
}

#[test]
fn instruction_sets_agree() {
    const PARAMS: usize = 1027;
    let (weights, gradient) = (any_floats(1, PARAMS), any_floats(4, PARAMS));
    for algorithm in algorithms() {
        for layout in every_layout(&algorithm) {
            let run = |isa| {
                let optimizer = optimizer_on(isa, algorithm, layout).unwrap();
                let mut state = State::initialized(optimizer.as_ref(), &weights);
                for step in 1..=3 {
                    let args = algorithm.step(step, 1e-2);
                    optimizer.update(&args, Gradient::F32(&gradient), &mut state.slices()).unwrap();
                }
                state
            };
            let mut states = Isa::available().map(run);
            let baseline = states.next().unwrap();
            assert!(states.all(|state| state == baseline), "{algorithm} {layout:?}");
        }
    }
}

#[test]
fn adagrad_starts_from_its_initial_value() {
    let algorithm = Algorithm::Adagrad(Adagrad { initial_accumulator_value: 0.25, ..Adagrad::default() });
    for layout in every_layout(&algorithm) {
        let state = State::initialized(optimizer(algorithm, layout).unwrap().as_ref(), &noise(1, 69));
        assert_eq!(state.moment(StateKind::Moment2), [0.25; 69], "{layout:?}");
    }
}

#[test]
fn sgd_without_momentum_forgets_an_infinite_gradient_in_the_buffer() {
    let algorithm = Algorithm::Sgd(Sgd::default());
    let [layout, ..] = layouts(&algorithm);
    let optimizer = optimizer(algorithm, layout).unwrap();
    let mut state = State::initialized(optimizer.as_ref(), &[1.0]);
    state.set(StateKind::Moment1, &[f32::INFINITY]);
    optimizer.update(&algorithm.step(2, 0.5), Gradient::F32(&[1.0]), &mut state.slices()).unwrap();
    assert_eq!(state.master(), [0.5]);
}

#[test]
fn hyperparameters_out_of_range_are_refused_by_name() {
    let (adam, adagrad, lion) = (Adam::default(), Adagrad::default(), Lion::default());
    let cases = [
        (Algorithm::AdamW(AdamW { beta1: 1.0, ..AdamW::default() }), "beta1"),
        (Algorithm::Adam(Adam { beta1: -0.1, ..adam }), "beta1"),
        (Algorithm::Adam(Adam { beta2: 1.0, ..adam }), "beta2"),
        (Algorithm::Adam(Adam { eps: -1.0, ..adam }), "eps"),
        (Algorithm::Adam(Adam { weight_decay: f64::NAN, ..adam }), "weight_decay"),
        (Algorithm::Adagrad(Adagrad { eps: f64::INFINITY, ..adagrad }), "eps"),
        (Algorithm::Adagrad(Adagrad { lr_decay: -1.0, ..adagrad }), "lr_decay"),
        (
            Algorithm::Adagrad(Adagrad { initial_accumulator_value: -1.0, ..adagrad }),
            "initial_accumulator_value",
        ),
        (Algorithm::Adagrad(Adagrad { weight_decay: -1.0, ..adagrad }), "weight_decay"),
        (Algorithm::Lion(Lion { beta1: f64::NAN, ..lion }), "beta1"),
        (Algorithm::Lion(Lion { beta2: 1.0, ..lion }), "beta2"),
        (Algorithm::Lion(Lion { weight_decay: -1.0, ..lion }), "weight_decay"),
        (Algorithm::Sgd(Sgd { momentum: -0.5, ..Sgd::default() }), "momentum"),
        (Algorithm::Sgd(Sgd { nesterov: true, ..Sgd::default() }), "momentum"),
        (Algorithm::Sgd(Sgd { weight_decay: -1.0, ..Sgd::default() }), "weight_decay"),
    ];
    for (algorithm, name) in cases {
        let [layout, ..] = layouts(&algorithm);
        let Err(error) = optimizer(algorithm, layout) else { panic!("{algorithm:?} was accepted") };
        assert!(matches!(error, OptimizerError::Hyperparameter { name: n, .. } if n == name), "{error}");
    }
}

#[test]
fn arguments_out_of_range_leave_the_state_alone() {
    for algorithm in algorithms() {
        let [layout, ..] = layouts(&algorithm);
        let optimizer = optimizer(algorithm, layout).unwrap();
        let mut state = State::initialized(optimizer.as_ref(), &[1.0, 2.0]);
        let (before, good) = (state.clone(), algorithm.step(1, 1e-3));
        let cases = [
            (StepArgs { step: 0, ..good }, "step"),
            (StepArgs { lr: -1.0, ..good }, "learning rate"),
            (StepArgs { weight_decay: f64::INFINITY, ..good }, "weight_decay"),
            (StepArgs { grad_scale: f32::NAN, ..good }, "grad_scale"),
            (StepArgs { grad_scale: f32::INFINITY, ..good }, "grad_scale"),
            (StepArgs { grad_scale: clip_coefficient(2.0, -1.0), ..good }, "grad_scale"),
        ];
        for (args, name) in cases {
            let gradient = Gradient::F32(&[1.0, 1.0]);
            let error = optimizer.update(&args, gradient, &mut state.slices()).unwrap_err();
            assert!(error.to_string().starts_with(name), "{algorithm}: {error}");
        }
        let short = optimizer.update(&good, Gradient::F32(&[1.0]), &mut state.slices()).unwrap_err();
        assert!(matches!(short, OptimizerError::KindLength { params: 1, .. }), "{algorithm}: {short}");
        assert_eq!(state, before);
    }
}

fn any_floats(seed: u32, n: usize) -> Vec<f32> {
    let halves = noise(seed, 2 * n);
    let half = |x: f32| u32::from(((x + 1.0) * 32768.0) as u16);
    halves.chunks_exact(2).map(|pair| f32::from_bits(half(pair[0]) << 16 | half(pair[1]))).collect()
}

/// Those that keep every bit.
fn layouts(algorithm: &Algorithm) -> [StateLayout; 4] {
    let [a, b, c, d, ..] = every_layout(algorithm);
    [a, b, c, d]
}

fn update_in_chunks(optimizer: &dyn Optimizer, args: &StepArgs, gradient: &[bf16], state: &mut State) {
    const CHUNK: usize = 31 * COMPACT_BLOCK;
    let mut slices = state.slices();
    let kinds = optimizer.layout().kinds();
    let mut rest: Vec<_> =
        slices.iter_mut().zip(kinds).map(|(slice, kind)| slice.chunks_mut(kind.bytes_for(CHUNK))).collect();
    for piece in Gradient::Bf16(gradient).chunks(CHUNK) {
        let mut piece_state: Vec<&mut [u8]> = rest.iter_mut().filter_map(Iterator::next).collect();
        optimizer.update(args, piece, &mut piece_state).unwrap();
    }
}

/// One recorded trajectory: its configuration and the state after `step` steps.
struct Case {
    name: String,
    algorithm: Algorithm,
    lr: f64,
    grad_scale: f32,
    size: usize,
    step: u64,
    recorded: Vec<(StateKind, Recorded)>,
}

/// The names in the fixture; `weight` is the f32 master.
const RECORDED: [(&str, StateKind); 3] =
    [("weight", StateKind::Weight), ("moment1", StateKind::Moment1), ("moment2", StateKind::Moment2)];

impl Case {
    fn new(fixture: &Value, case: &Value) -> Self {
        let of_config = |c: &&Value| c["name"] == case["config"];
        let config =
            array(&fixture["configs"]).iter().find(of_config).expect("every case names a configuration");
        let (size, step) = (case["size"].as_u64().unwrap() as usize, case["step"].as_u64().unwrap());
        let recorded = RECORDED.iter().filter_map(|(name, kind)| Some((*kind, Recorded::new(case, name)?)));
        Self {
            name: format!("{} size {size} step {step}", config["name"]),
            algorithm: algorithm_of(config),
            lr: number(&config["lr"]),
            grad_scale: number(&config["grad_scale"]) as f32,
            size,
            step,
            recorded: recorded.collect(),
        }
    }

    fn is_exact(&self, kind: StateKind) -> bool {
        match self.algorithm {
            Algorithm::Lion(_) | Algorithm::Sgd(_) => true,
            _ => kind != StateKind::Weight && self.algorithm.weight_decay() == 0.0,
        }
    }

    fn run(&self, layout: StateLayout) -> BTreeMap<StateKind, Path> {
        let optimizer = optimizer(self.algorithm, layout).unwrap();
        let mut state = State::initialized(optimizer.as_ref(), &noise(self.size as u32, self.size));
        let mut paths = BTreeMap::<StateKind, Path>::new();
        paths.entry(StateKind::Weight).or_default().push(&state.master());
        for step in 1..=self.step {
            let gradient = noise(1000 * step as u32 + self.size as u32, self.size);
            let args = StepArgs { grad_scale: self.grad_scale, ..self.algorithm.step(step, self.lr) };
            optimizer.update(&args, Gradient::F32(&gradient), &mut state.slices()).unwrap();
            paths.entry(StateKind::Weight).or_default().push(&state.master());
            for kind in moments(&self.algorithm) {
                paths.entry(*kind).or_default().push(state.kind(*kind));
            }
        }
        paths
    }
}

fn algorithm_of(config: &Value) -> Algorithm {
    let field = |name: &str| number(&config[name]);
    let weight_decay = field("weight_decay");
    match config["algorithm"].as_str().unwrap() {
        "adam" => {
            let [beta1, beta2, eps] = ["beta1", "beta2", "eps"].map(field);
            Algorithm::Adam(Adam { beta1, beta2, eps, weight_decay })
        }
        "adagrad" => Algorithm::Adagrad(Adagrad {
            eps: field("eps"),
            lr_decay: field("lr_decay"),
            initial_accumulator_value: field("initial_accumulator_value"),
            weight_decay,
        }),
        "lion" => {
            let [beta1, beta2] = ["beta1", "beta2"].map(field);
            Algorithm::Lion(Lion { beta1, beta2, weight_decay })
        }
        "sgd" => {
            let nesterov = config["nesterov"].as_bool().unwrap();
            Algorithm::Sgd(Sgd { momentum: field("momentum"), nesterov, weight_decay })
        }
        other => panic!("unknown algorithm {other} in the fixture"),
    }
}
