//! Parameter groups: every parameter is trained as in a run in which all have its learning rate and weight decay.

#[path = "engine_support/mod.rs"]
mod support;

use support::{LR, Setup, weights};
use terrace_optimizer::{AdamW, GroupLr, GroupRule, StateFormat};
use terrace_zero::Placement;

const STATES: [StateFormat; 4] =
    [StateFormat::Split, StateFormat::Fp32, StateFormat::Bf16, StateFormat::Compact];

fn adamw(weight_decay: f64) -> AdamW {
    AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay }
}

/// The weights after one step, of which the gradient depends on nothing but the first weights.
fn after_one_step(setup: &Setup, lr: f64) -> Vec<(String, Vec<u8>)> {
    let mut engine = setup.create();
    engine.train_step(&setup.batches(0), lr).unwrap();
    weights(&mut engine)
}

#[test]
fn each_parameter_is_that_of_its_own_uniform_run() {
    let dir = tempfile::tempdir().unwrap();
    for state in STATES {
        let on_disk = |name: &str| Setup {
            placement: Placement::Disk,
            disks: vec![dir.path().join(format!("{name}-{state}"))],
            state,
            // A step large enough for the decay to show in bf16.
            optimizer: adamw(20.0).into(),
            ..Setup::new(false)
        };
        let uniform = |name: &str, decay: f64, lr: f64| {
            after_one_step(&Setup { optimizer: adamw(decay).into(), ..on_disk(name) }, lr)
        };
        let plain = uniform("plain", 20.0, LR);
        let no_decay = uniform("no-decay", 0.0, LR);
        let slower = uniform("slower", 20.0, LR / 2.0);
        let groups = vec![
            GroupRule::new("*q_proj*").lr(GroupLr::Scale(0.5)),
            GroupRule::new("*lm_head*").lr(GroupLr::Own(LR / 2.0)),
            GroupRule::new("*norm*").weight_decay(0.0),
        ];
        let grouped = after_one_step(&Setup { groups, ..on_disk("grouped") }, LR);
        for (index, (name, bytes)) in grouped.iter().enumerate() {
            let (wanted, other) = if name.contains("norm") {
                (&no_decay, &plain)
            } else if name.contains("q_proj") || name.contains("lm_head") {
                (&slower, &plain)
            } else {
                (&plain, &no_decay)
            };
            assert!(*bytes == wanted[index].1, "{state}: {name} has another group's update");
            assert!(*bytes != other[index].1, "{state}: the groups of {name} do not differ");
        }
    }
}

#[test]
fn frozen_parameters_keep_their_bits_and_have_no_gradient() {
    let dir = tempfile::tempdir().unwrap();
    for state in STATES {
        for placement in [Placement::None, Placement::Disk] {
            let name = format!("{state}-{placement}");
            let setup = Setup {
                placement,
                disks: vec![dir.path().join(&name)],
                state,
                groups: vec![GroupRule::new("*.mlp.*").frozen(), GroupRule::new("*embed*").frozen()],
                ..Setup::new(true)
            };
            let mut engine = setup.create();
            let before = weights(&mut engine);
            let norm = engine.train_step(&setup.batches(0), LR).unwrap().grad_norm;
            setup.continue_to(&mut engine, 3);
            for ((name, before), (_, after)) in before.iter().zip(weights(&mut engine)) {
                let frozen = name.contains(".mlp.") || name.contains("embed");
                assert_eq!(*before == after, frozen, "{name}");
            }
            let all =
                Setup { groups: Vec::new(), disks: vec![dir.path().join(format!("{name}-all"))], ..setup };
            let whole = all.create().train_step(&all.batches(0), LR).unwrap().grad_norm;
            assert!(norm < 0.9 * whole, "{norm} of {whole}");
        }
    }
}

#[test]
fn a_pattern_that_matches_nothing_is_refused_by_name() {
    let setup = Setup { groups: vec![GroupRule::new("*norms*")], ..Setup::new(true) };
    let error = setup.try_create().unwrap_err().to_string();
    assert!(error.contains("`*norms*` matches no parameter"), "{error}");
    let setup = Setup { groups: vec![GroupRule::new("*").weight_decay(-1.0)], ..Setup::new(true) };
    let error = setup.try_create().unwrap_err().to_string();
    assert!(error.starts_with("weight_decay of a parameter group is -1"), "{error}");
}
