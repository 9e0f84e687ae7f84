//! The dynamic loss scale is DeepSpeed's at every step, also when it is saved and resumed between any two.
//!
//! The fixture comes from `fixtures/make_loss_scales.py`.

mod common;

use common::fixtures::{array, fixture, number};
use serde_json::Value;
use terrace_optimizer::{LossScaleConfig, LossScaler, OptimizerError};

#[test]
fn every_step_is_deepspeeds() {
    let fixture = fixture("loss_scales.json");
    let (mut raised, mut halved, mut doubled) = (0, 0, 0);
    for case in array(&fixture["cases"]) {
        let config = config_of(case);
        let mut scaler = LossScaler::new(config).unwrap();
        let (scales, left) = (array(&case["scales"]), array(&case["hysteresis_left"]));
        for (at, step) in steps(case).enumerate() {
            let before = scaler.scale();
            let updated = scaler.update(step);
            if at == scales.len() {
                assert_eq!(updated, Err(OptimizerError::LossScaleAtMinimum(before)), "{case}");
                raised += 1;
                break;
            }
            assert_eq!(updated, Ok(()), "step {at} of {case}");
            assert_eq!(scaler.scale(), number(&scales[at]), "step {at} of {case}");
            assert_eq!(f64::from(scaler.state().hysteresis), number(&left[at]), "step {at} of {case}");
            halved += usize::from(scaler.scale() < before);
            doubled += usize::from(scaler.scale() > before);
            scaler = LossScaler::resume(config, scaler.state()).unwrap();
        }
    }
    assert!(raised > 5 && halved > 100 && doubled > 100, "the cases cover {raised}, {halved} and {doubled}");
}

#[test]
fn the_defaults_are_deepspeeds() {
    let fixture = &fixture("loss_scales.json")["defaults"];
    let mut scaler = LossScaler::new(LossScaleConfig::default()).unwrap();
    let mut changes = Vec::new();
    for (at, step) in steps(fixture).enumerate() {
        let before = scaler.scale();
        scaler.update(step).unwrap();
        if scaler.scale() != before {
            changes.push((at as f64, scaler.scale()));
        }
    }
    let [at, scales] = ["changes", "scales"].map(|key| array(&fixture[key]).iter().map(number));
    assert_eq!(changes, at.zip(scales).collect::<Vec<_>>());
    assert_eq!(f64::from(scaler.state().hysteresis), number(&fixture["hysteresis"]));
}

/// Whether each step of the case overflows.
fn steps(case: &Value) -> impl Iterator<Item = bool> {
    case["steps"].as_str().unwrap().chars().map(|step| step == 'x')
}

fn config_of(case: &Value) -> LossScaleConfig {
    LossScaleConfig {
        loss_scale: 0.0,
        initial_scale_power: number(&case["initial_scale_power"]) as u32,
        loss_scale_window: number(&case["loss_scale_window"]) as u64,
        hysteresis: number(&case["hysteresis"]) as u32,
        consecutive_hysteresis: case["consecutive_hysteresis"].as_bool().unwrap(),
        min_loss_scale: number(&case["min_loss_scale"]),
    }
}
