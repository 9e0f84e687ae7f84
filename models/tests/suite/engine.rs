//! Parity of the engine as a whole: training with all state on disk gives what torch and transformers give.

use crate::card;
use crate::fixture::{Fixture, numbers, steps, weights_of};
use crate::parity::furthest;
use std::sync::Arc;
use terrace_aio::engine::{EngineConfig as IoConfig, open_default};
use terrace_device::host::HostDevice;
use terrace_kernels::{DType, cpu};
use terrace_models::{Model, export_folder};
use terrace_optimizer::{AdamW, StateFormat};
use terrace_zero::{Backend, BatchLimits, Engine, EngineConfig, Placement, TrainingConfig, WindowOverrides};

/// Trains a fixture's ten steps from its folder with state in `disk`.
fn train(fixture: &Fixture, dtype: DType, disk: &std::path::Path) -> (Engine, Vec<f64>, Vec<f64>) {
    let model = Model::from_folder(&fixture.folder).unwrap();
    let mut source = fixture.weights();
    let batches = fixture.batches(&model.config);
    let steps = steps(&fixture.json("train.json"), &batches);
    let first = &steps[0];
    let state = if dtype == DType::F32 { StateFormat::Fp32 } else { StateFormat::Split };
    let limits = BatchLimits {
        sequences: first[0].sequences,
        length: first[0].length,
        micro_batches: first.len(),
        cache_length: 0,
        cache_pages: 0,
    };
    let config = EngineConfig {
        training: Some(TrainingConfig {
            state,
            optimizer: AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }.into(),
            clip: Some(1.0),
            ..TrainingConfig::default()
        }),
        placement: Placement::Disk,
        disks: vec![disk.to_owned()],
        host_budget: 1 << 30,
        threads: 2,
        overrides: WindowOverrides { chunk_elements: Some(1 << 14), ..WindowOverrides::default() },
        ..EngineConfig::new(dtype, limits)
    };
    let io = open_default(&IoConfig::default()).unwrap();
    let backend = card::backend(&io).unwrap_or_else(|| Backend {
        device: Arc::new(HostDevice::unified()),
        kernels: cpu::kernel_set(2),
        updates: None,
        kernel_scratch_bytes: cpu::scratch_bytes(2) as u64,
        io,
    });
    let mut engine = Engine::create(config, backend, model.blocks, &first[0], &mut source).unwrap();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in &steps {
        let report = engine.train_step(step, 1e-3).unwrap();
        losses.push(report.loss);
        norms.push(report.grad_norm);
    }
    (engine, losses, norms)
}

fn close(name: &str, what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (step, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= tolerance * e.abs(), "{name}: {what} of step {step} is {f}, torch has {e}");
    }
}

#[test]
fn ten_steps_on_disk_in_f32() {
    for fixture in Fixture::all() {
        let dir = tempfile::tempdir().unwrap();
        let (mut engine, losses, norms) = train(&fixture, DType::F32, dir.path());
        let expected = fixture.json("train.json");
        close(fixture.name, "the loss", &losses, &numbers::<f64>(&expected["losses"]), 1e-4);
        close(fixture.name, "the gradient norm", &norms, &numbers::<f64>(&expected["grad_norms"]), 1e-3);
        // What the user gets: an exported folder, read back.
        let out = dir.path().join("out");
        let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
        export_folder(&mut engine.weights().unwrap(), Some(&fixture.folder), &out, 64 << 10, &config)
            .unwrap();
        let mut exported = weights_of(&out);
        let trained = fixture.arrays("train.safetensors");
        for block in &Model::from_folder(&out).unwrap().blocks {
            for param in block.params() {
                let mut found = vec![0.0; param.elements()];
                terrace_zero::WeightSource::read(&mut exported, param, 0, &mut found).unwrap();
                let expected = trained[&format!("final.{}", param.name)].floats();
                let error = furthest(&found, &expected);
                assert!(error <= 1e-3, "{}: {} is off by {error}", fixture.name, param.name);
            }
        }
    }
}

#[test]
fn ten_steps_on_disk_in_bf16() {
    for fixture in Fixture::all() {
        let dir = tempfile::tempdir().unwrap();
        let (_, losses, _) = train(&fixture, DType::BF16, dir.path());
        let expected = fixture.json("train.json");
        close(fixture.name, "the bf16 loss", &losses, &numbers::<f64>(&expected["losses_bf16"]), 2e-2);
    }
}
