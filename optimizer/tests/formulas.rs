//! Every algorithm in every format is its formula in f64: one step but for one rounding, and many within a bound.

mod common;

use common::reference::Reference;
use common::{State, algorithms, every_layout, moments, noise};
use terrace_optimizer::{
    Adagrad, AdamW, Algorithm, COMPACT_BLOCK, Gradient, Lion, Sgd, StateFormat, StateKind, StateLayout,
    StepArgs, optimizer,
};

const SIZES: [usize; 9] = [1, 22, 31, 32, 33, 64, 127, 1024, 65536 + 3];

/// From stored state, one step is the formula and one rounding of each number.
#[test]
fn one_step_errs_by_one_rounding() {
    for algorithm in every_algorithm() {
        for layout in every_layout(&algorithm) {
            let optimizer = optimizer(algorithm, layout).unwrap();
            for size in SIZES {
                let mut state = State::initialized(optimizer.as_ref(), &noise(1, size));
                for step in 1..=5 {
                    let mut exact = Reference::of(&algorithm, &state);
                    // Magnitudes over twelve binades, so that blocks are uneven.
                    let spread = |(i, x): (usize, &f32)| x * 2f32.powi(-((i * 7 % 13) as i32));
                    let gradient: Vec<f32> =
                        noise(10 + step as u32, size).iter().enumerate().map(spread).collect();
                    let args = StepArgs { grad_scale: 0.7, ..algorithm.step(step, 1e-3) };
                    exact.update(algorithm, &args, &gradient);
                    optimizer.update(&args, Gradient::F32(&gradient), &mut state.slices()).unwrap();
                    within_one_rounding(&algorithm, &state, &exact);
                }
            }
        }
    }
}

fn within_one_rounding(algorithm: &Algorithm, state: &State, exact: &Reference) {
    /// Of f32 arithmetic, relative to the terms of the sums.
    const ARITHMETIC: f64 = 1e-6;
    let largest = |values: &[f64]| values.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    let format = state.layout().format();
    let name = format!("{algorithm:?} {:?}", state.layout());
    // Relative errors, and in `compact` those near zero relative to the largest of the block.
    let (master, moment) = match format {
        StateFormat::Bf16 => (0.0, 2f64.powi(-7)),
        StateFormat::Compact => (2f64.powi(-15), 2f64.powi(-4)),
        _ => (0.0, 0.0),
    };
    for (ours, exact) in state.master().iter().zip(&exact.p) {
        let error = (f64::from(*ours) - exact).abs();
        assert!(error <= master * exact.abs() + ARITHMETIC, "{name} master {ours} {exact}");
    }
    // Decay that is added to the gradient cancels more.
    let terms = if matches!(algorithm, Algorithm::AdamW(_)) { 0.01 } else { 0.1 };
    for kind in moments(algorithm) {
        let near_zero = if *kind == StateKind::Moment1 { -10 } else { -18 };
        let (ours, exact) = (state.moment(*kind), exact.moment(*kind));
        for (ours, exact) in ours.chunks(COMPACT_BLOCK).zip(exact.chunks(COMPACT_BLOCK)) {
            // The scale is at most 32/31 of the largest.
            let floor = largest(exact) * 1.04 * 2f64.powi(near_zero);
            let floor = if format == StateFormat::Compact { floor } else { 0.0 };
            for (ours, exact) in ours.iter().zip(exact) {
                let error = (ours - exact).abs();
                let bound = (moment * exact.abs()).max(floor) + ARITHMETIC * largest(&[*exact, terms]);
                assert!(error <= bound, "{name} {kind} {ours} {exact}: {error:e} > {bound:e}");
            }
        }
    }
}

/// Formats that keep every bit stay at the formula. The errors of those that round are small beside the way that a weight goes,
/// and cancel over the parameters.
#[test]
fn a_hundred_steps_follow_the_formula() {
    const PARAMS: usize = 4096;
    const STEPS: u64 = 100;
    let weights = noise(7, PARAMS);
    // A gradient with a mean, so that there is a way to go.
    let gradient = |step: u64| -> Vec<f32> { noise(step as u32, PARAMS).iter().map(|x| x + 0.5).collect() };
    let gradients: Vec<Vec<f32>> = (1..=STEPS).map(gradient).collect();
    let args = |algorithm: &Algorithm, step| StepArgs { grad_scale: 0.7, ..algorithm.step(step, 1e-3) };
    for algorithm in every_algorithm() {
        let mut exact = Reference::of(&algorithm, &start(algorithm, every_layout(&algorithm)[0], &weights));
        for (step, gradient) in (1..).zip(&gradients) {
            exact.update(algorithm, &args(&algorithm, step), gradient);
        }
        let way: Vec<f64> = exact.p.iter().zip(&weights).map(|(p, start)| p - f64::from(*start)).collect();
        for layout in every_layout(&algorithm) {
            let optimizer = optimizer(algorithm, layout).unwrap();
            let mut state = start(algorithm, layout, &weights);
            for (step, gradient) in (1..).zip(&gradients) {
                let args = args(&algorithm, step);
                optimizer.update(&args, Gradient::F32(gradient), &mut state.slices()).unwrap();
            }
            let errors: Vec<f64> =
                state.master().iter().zip(&exact.p).map(|(ours, p)| f64::from(*ours) - p).collect();
            let largest = errors.iter().fold(0.0f64, |largest, error| largest.max(error.abs()));
            let (error, mean) = (rms(&errors) / rms(&way), mean(&errors).abs() / rms(&way));
            let name = format!("{algorithm:?} {layout:?}");
            println!("{name}: largest {largest:e}, of the way {error:.2e}, in the mean {mean:.1e}");
            match layout.format() {
                StateFormat::Bf16 => assert!(error <= 0.01 && mean <= 0.005, "{name}: {error} {mean}"),
                StateFormat::Compact => assert!(error <= 0.06 && mean <= 0.005, "{name}: {error} {mean}"),
                _ if matches!(algorithm, Algorithm::AdamW(_)) => {
                    assert!(largest <= 2e-6, "{name}: {largest:e}");
                }
                // Half the spacing of f32 below 2, every step.
                _ => assert!(largest <= STEPS as f64 * 2f64.powi(-24), "{name}: {largest:e}"),
            }
        }
    }
}

fn start(algorithm: Algorithm, layout: StateLayout, weights: &[f32]) -> State {
    State::initialized(optimizer(algorithm, layout).unwrap().as_ref(), weights)
}

fn rms(values: &[f64]) -> f64 {
    mean(&values.iter().map(|x| x * x).collect::<Vec<_>>()).sqrt()
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// One of each with everything switched on, and what has a formula of its own.
fn every_algorithm() -> impl Iterator<Item = Algorithm> {
    let adagrad = Adagrad { lr_decay: 0.01, initial_accumulator_value: 0.25, ..Adagrad::default() };
    let more = [
        Algorithm::AdamW(AdamW { beta2: 0.99, weight_decay: 0.05, ..AdamW::default() }),
        Algorithm::Adagrad(adagrad),
        Algorithm::Lion(Lion::default()),
        Algorithm::Sgd(Sgd { momentum: 0.9, nesterov: false, weight_decay: 0.1 }),
        Algorithm::Sgd(Sgd::default()),
    ];
    algorithms().into_iter().chain(more)
}
