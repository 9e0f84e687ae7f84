//! The formats that round, `bf16` and `compact`, are right in the mean. How wrong one rounding may be, `formulas.rs` tests.

mod common;

use common::reference::Reference;
use common::{State, layout, noise};
use terrace_optimizer::{AdamW, Gradient, StateFormat, StateKind, WeightType, adamw};

const FORMATS: [StateFormat; 2] = [StateFormat::Bf16, StateFormat::Compact];

/// A step moves a weight by about lr, and its direction errs by the noise of the moments, which is independent
/// from step to step: the drift grows as a random walk, not as a line.
#[test]
fn weights_drift_as_a_random_walk() {
    const STEPS: u64 = 200;
    const LR: f64 = 1e-3;
    let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
    let weights = noise(7, 4096);
    let mut reference = Reference::new(&weights);
    let gradients: Vec<_> = (1..=STEPS).map(|step| noise(step as u32, weights.len())).collect();
    for (step, gradient) in (1..).zip(&gradients) {
        reference.update(config, &config.step(step, LR), gradient);
    }
    for (format, walk) in FORMATS.into_iter().zip([0.012, 0.09]) {
        let optimizer = adamw(config, layout(format, WeightType::Bf16));
        let mut state = State::initialized(optimizer.as_ref(), &weights);
        for (step, gradient) in (1..).zip(&gradients) {
            optimizer.update(&config.step(step, LR), Gradient::F32(gradient), &mut state.slices()).unwrap();
        }
        let errors: Vec<f64> =
            state.master().iter().zip(&reference.p).map(|(x, p)| f64::from(*x) - p).collect();
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let rms = (errors.iter().map(|e| e * e).sum::<f64>() / errors.len() as f64).sqrt();
        let bound = walk * LR * (STEPS as f64).sqrt();
        println!("{format}: rms {rms:e}, mean {mean:e}, bound {bound:e}");
        assert!(rms <= bound, "{format}: {rms:e} > {bound:e}");
        assert!(
            mean.abs() <= 5.0 * rms / (errors.len() as f64).sqrt(),
            "{format}: the mean error is {mean:e}"
        );
        // Another formula for the second moment would not pass: the walk is far shorter than the way.
        assert!(bound < 0.2 * LR * STEPS as f64);
    }
}

/// v of a constant gradient approaches g²: its steps are far below the spacing of the formats.
#[test]
fn second_moments_are_unbiased_where_nearest_would_stand_still() {
    const STEPS: u64 = 3000;
    const PARAMS: usize = 4096;
    let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
    // Not a number of the grid, and every parameter its own.
    let gradient: Vec<f32> = noise(3, PARAMS).iter().map(|x| 1.3 + 0.1 * x).collect();
    let exact: Vec<f64> =
        gradient.iter().map(|g| f64::from(*g).powi(2) * (1.0 - config.beta2.powi(STEPS as i32))).collect();
    // A walk of steps of one spacing s, taken with a probability of the progress over s: the variance of v is below
    // s/2 · v, and the mean of that over the parameters is what chance allows.
    for (format, spacing) in FORMATS.into_iter().zip([2f64.powi(-7), 2f64.powi(-4)]) {
        let optimizer = adamw(config, layout(format, WeightType::Bf16));
        let mut state = State::initialized(optimizer.as_ref(), &noise(5, PARAMS));
        for step in 1..=STEPS {
            optimizer
                .update(&config.step(step, 1e-4), Gradient::F32(&gradient), &mut state.slices())
                .unwrap();
        }
        let allowed = 5.0 * (spacing / 2.0 / PARAMS as f64).sqrt();
        let v = state.moment(StateKind::Moment2);
        let bias = mean_relative(&v, &exact);
        println!("{format}: bias {bias:e}, allowed {allowed:e}");
        assert!(bias.abs() <= allowed, "{format}: {bias:e} > {allowed:e}");

        let nearest: Vec<f64> =
            gradient.iter().map(|g| nearest_v(f64::from(*g), config.beta2, STEPS, spacing)).collect();
        let bias = mean_relative(&nearest, &exact);
        println!("{format}: nearest is off by {bias:e}");
        assert!(bias.abs() > 10.0 * allowed, "nearest would pass: {bias:e}");
    }
}

/// m of a constant gradient is the gradient in the mean; rounded to nearest it would stop some half spacings short.
#[test]
fn first_moments_are_unbiased_where_nearest_would_stop_short() {
    const PARAMS: usize = 4096;
    let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
    let gradient: Vec<f32> = noise(3, PARAMS).iter().map(|x| 1.45 + 0.4 * x).collect();
    let exact: Vec<f64> = gradient.iter().map(|g| f64::from(*g)).collect();
    for (format, spacing) in FORMATS.into_iter().zip([2f64.powi(-7), 2f64.powi(-4)]) {
        let optimizer = adamw(config, layout(format, WeightType::Bf16));
        let mut state = State::initialized(optimizer.as_ref(), &noise(5, PARAMS));
        for step in 1..=300 {
            optimizer
                .update(&config.step(step, 1e-4), Gradient::F32(&gradient), &mut state.slices())
                .unwrap();
        }
        // One rounding has a variance of at most s²/4, and a step forgets all but 0.81 of it.
        let allowed = 5.0 * spacing / 2.0 / (0.19 * PARAMS as f64).sqrt();
        let bias = mean_relative(&state.moment(StateKind::Moment1), &exact);
        assert!(bias.abs() <= allowed, "{format}: {bias:e} > {allowed:e}");
        let nearest = |g: &f64| {
            (0..300).fold(0.0, |m: f64, _| {
                let m = m + 0.1 * (g - m);
                let unit = 2f64.powi(m.log2().floor() as i32) * spacing;
                (m / unit).round() * unit
            })
        };
        let bias = mean_relative(&exact.iter().map(nearest).collect::<Vec<_>>(), &exact);
        assert!(bias.abs() > 2.0 * allowed, "{format}: nearest would pass: {bias:e}, {allowed:e}");
    }
}

/// v when every step is rounded to nearest with as many bits as `spacing`, the largest relative one, says.
fn nearest_v(g: f64, beta2: f64, steps: u64, spacing: f64) -> f64 {
    (0..steps).fold(0.0, |v: f64, _| {
        let v = beta2 * v + (1.0 - beta2) * g * g;
        let unit = 2f64.powi(v.log2().floor() as i32) * spacing;
        (v / unit).round() * unit
    })
}

fn mean_relative(ours: &[f64], exact: &[f64]) -> f64 {
    ours.iter().zip(exact).map(|(x, exact)| x / exact - 1.0).sum::<f64>() / ours.len() as f64
}

/// With a learning rate far below the spacing of the masters, the mean weight moves all the same.
#[test]
fn small_steps_are_not_lost() {
    const STEPS: u64 = 100;
    let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
    let lr = 1e-6;
    for format in FORMATS {
        let optimizer = adamw(config, layout(format, WeightType::Bf16));
        let weights: Vec<f32> = noise(2, 4096).iter().map(|x| 0.75 + 0.2 * x).collect();
        let mut state = State::initialized(optimizer.as_ref(), &weights);
        let start = state.master();
        let gradient: Vec<f32> = noise(5, 4096).iter().map(|x| 1.0 + 0.5 * x).collect();
        for step in 1..=STEPS {
            optimizer.update(&config.step(step, lr), Gradient::F32(&gradient), &mut state.slices()).unwrap();
        }
        let moved: f64 =
            state.master().iter().zip(&start).map(|(a, b)| f64::from(*b) - f64::from(*a)).sum::<f64>()
                / 4096.0;
        let way = lr * STEPS as f64;
        // Chance: steps of one spacing, 2^-16, with the probability of lr over it.
        let chance = 5.0 * (way * 2f64.powi(-16) / 4096.0).sqrt();
        assert!((moved - way).abs() <= 0.05 * way + chance, "{format}: {moved:e} of {way:e}");
    }
}

/// Nothing that is finite becomes NaN, zeros stay zeros, and what is not finite stays with its parameter.
#[test]
fn zeros_subnormals_and_non_finite_values() {
    let config = AdamW { weight_decay: 0.0, ..AdamW::default() };
    for format in FORMATS {
        let optimizer = adamw(config, layout(format, WeightType::Bf16));
        let weights = noise(6, 96);
        let mut state = State::initialized(optimizer.as_ref(), &weights);
        let start = state.master();
        for step in 1..=3 {
            optimizer
                .update(&config.step(step, 1e-3), Gradient::F32(&[0.0; 96]), &mut state.slices())
                .unwrap();
        }
        assert_eq!(state.master(), start, "{format}: a zero gradient moves nothing");
        // The smallest code is not subnormal, nor is what a step makes of it.
        let zero = if format == StateFormat::Compact { 2f64.powi(-120) } else { 1e-38 };
        assert!(state.moment(StateKind::Moment2).iter().all(|v| *v < zero), "{format}: as good as zero");

        for value in [f32::MIN_POSITIVE / 8.0, f32::from_bits(1), 1e-25, 1e18, 1e25, f32::MAX, -f32::MAX] {
            let mut state = State::initialized(optimizer.as_ref(), &weights);
            let mut gradient = noise(8, 96);
            gradient[40] = value;
            for step in 1..=20 {
                optimizer
                    .update(&config.step(step, 1e-3), Gradient::F32(&gradient), &mut state.slices())
                    .unwrap();
            }
            assert!(state.master().iter().all(|x| x.is_finite()), "{format} after gradients of {value}");
            for kind in [StateKind::Moment1, StateKind::Moment2] {
                assert!(state.moment(kind).iter().all(|x| !x.is_nan()), "{format} {kind} after {value}");
            }
        }

        let mut state = State::initialized(optimizer.as_ref(), &weights);
        let mut clean = state.clone();
        let mut gradient = noise(8, 96);
        gradient[40] = 0.0;
        optimizer.update(&config.step(1, 1e-3), Gradient::F32(&gradient), &mut clean.slices()).unwrap();
        gradient[40] = f32::NAN;
        optimizer.update(&config.step(1, 1e-3), Gradient::F32(&gradient), &mut state.slices()).unwrap();
        for (i, (ours, clean)) in state.master().iter().zip(clean.master()).enumerate() {
            assert!(
                if i == 40 { ours.is_nan() } else { *ours == clean },
                "{format} parameter {i}: {ours} {clean}"
            );
        }
    }
}
