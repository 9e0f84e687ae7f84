//! A planning run over virtual memory predicts every block's peak exactly.

use crate::fixture::Fixture;
use crate::runner::{Peak, Runner};
use std::collections::HashMap;
use terrace_kernels::{DType, reference};
use terrace_models::{Model, TILE_ROWS, TokenBatch};

const SEQUENCES: usize = 3;
const LENGTH: usize = 11;

#[test]
fn planned_peaks_are_the_real_ones() {
    for fixture in Fixture::all() {
        for dtype in [DType::F32, DType::BF16] {
            let mut real = fixture.runner(reference::kernel_set(), dtype);
            let mut dry = Runner::dry(Model::from_folder(&fixture.folder).unwrap(), dtype);
            let batches = fixture.batches(&real.model.config);
            let (real, dry) = (all_modes(&mut real, &batches), all_modes(&mut dry, &batches));
            assert_eq!(dry, real, "{} in {dtype}", fixture.name);
            assert!(real.iter().any(|(block, what, _)| block == "head" && *what == "backward"));
        }
    }
}

/// The feed-forward of a long batch holds five tiles, not five whole tensors: with R = [`TILE_ROWS`] rows a backward takes
/// q, attention output, y1 (T·D each with H·K = D), k and v (T·G·K), log-sum-exp, and per tile norm output (R·D), its
/// statistics, and gate, up, dact, dgate, dup (R·F).
#[test]
fn long_sequences_are_tiled() {
    let (dtype, tokens) = (DType::BF16, 4 * TILE_ROWS);
    let config = terrace_models::ModelConfig::parse(
        r#"{"architectures": ["LlamaForCausalLM"], "vocab_size": 128, "hidden_size": 64,
            "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 4}"#,
    )
    .unwrap();
    let (D, F) = (config.hidden, config.feed_forward);
    let batch = TokenBatch::new(&config).blank(1, tokens);
    let mut runner = Runner::dry(Model::new(config), dtype);
    runner.train(&batch, 1.0, &mut HashMap::new());
    let whole = tokens * D * 5 * dtype.size() + tokens * 4 * 4;
    let tile = TILE_ROWS * (D + 5 * F) * dtype.size() + TILE_ROWS * 4;
    let (_, _, peak) =
        *runner.peaks.iter().find(|(name, what, _)| name == "layers.0" && *what == "backward").unwrap();
    assert_eq!(peak, whole + tile);
}

fn all_modes(runner: &mut Runner, batches: &TokenBatch) -> Vec<Peak> {
    let blank = batches.blank(SEQUENCES, LENGTH);
    runner.train(&blank, 1.0, &mut HashMap::new());
    runner.evaluate(&blank);
    let mut cache = runner.cache(SEQUENCES, LENGTH + 1);
    runner.generate(&blank, &mut cache);
    cache.lengths = vec![LENGTH; SEQUENCES];
    runner.generate(&batches.decode(&[0; SEQUENCES], &cache.lengths).unwrap(), &mut cache);
    std::mem::take(&mut runner.peaks)
}
