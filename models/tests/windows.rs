//! Windows fixed by hand: those with which no step can work are refused with what would, before anything is written.

#[path = "engine_support/mod.rs"]
mod support;

use support::Setup;
use terrace_models::{Model, RandomSource};
use terrace_optimizer::StateFormat;
use terrace_zero::{Engine, EngineConfig, WindowOverrides};

fn refused(setup: &Setup, overrides: WindowOverrides, parts: &[&str]) {
    let setup = Setup { overrides, ..setup.clone() };
    let error = setup.try_create().expect_err("refused").to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn chunks_that_cut_blocks_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    for state in [StateFormat::Split, StateFormat::Fp32, StateFormat::Bf16, StateFormat::Compact] {
        let on_disk = Setup { state, ..Setup::on_disk(true, vec![disk.clone()]) };
        for setup in [Setup { state, ..Setup::new(true) }, on_disk] {
            for (elements, nearest) in
                [(0, "16384"), (1, "16384"), (33, "16384"), (10_000, "16384"), (16_384 + 32, "32768")]
            {
                let overrides = WindowOverrides { chunk_elements: Some(elements), ..setup.overrides };
                let named = format!("chunks of {elements} elements cannot be used");
                refused(&setup, overrides, &[&named, "multiple of 16384", nearest]);
            }
        }
    }
    assert!(!disk.exists(), "nothing is written before the windows are checked");
}

#[test]
fn any_chunk_that_is_not_refused_works() {
    let dir = tempfile::tempdir().unwrap();
    let expected = Setup { state: StateFormat::Compact, ..Setup::new(true) }.run(2);
    for elements in [16_384, 3 * 16_384] {
        let setup = Setup {
            state: StateFormat::Compact,
            overrides: WindowOverrides { chunk_elements: Some(elements), ..WindowOverrides::default() },
            ..Setup::on_disk(true, vec![dir.path().join(elements.to_string())])
        };
        assert_eq!(setup.run(2), expected, "{elements}");
    }
}

#[test]
fn frozen_weights_have_no_norm() {
    let setup = Setup::new(true);
    let create = |elements: usize| {
        let overrides = WindowOverrides { chunk_elements: Some(elements), ..WindowOverrides::default() };
        let config = EngineConfig { training: None, overrides, ..setup.config() };
        let mut source = RandomSource::for_config(&setup.model, 7);
        let blocks = Model::new(setup.model.clone()).blocks;
        Engine::create(config, setup.backend(), blocks, &setup.sample(), &mut source)
    };
    assert!(create(192).is_ok());
    let error = create(100).unwrap_err().to_string();
    assert!(error.contains("a multiple of 64, for example 128"), "{error}");
}

#[test]
fn windows_without_slots_are_refused() {
    let setup = Setup::new(true);
    let none = WindowOverrides::default();
    refused(&setup, WindowOverrides { weight_slots: Some(0), ..none }, &["weight_slots is 0"]);
    refused(&setup, WindowOverrides { update_slots: Some(0), ..none }, &["update_slots is 0"]);
}
