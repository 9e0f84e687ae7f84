//! The numbers of transformers and torch, on every family and backend.

use crate::adamw::{self, State};
use crate::fixture::{Fixture, backends, numbers, steps};
use crate::runner::Runner;
use std::collections::HashMap;
use terrace_kernels::{DType, GateFunction, GroupScore, KernelSet, RopePairs, Scores, reference};
use terrace_models::{Mixture, Model, ModelConfig, Norms, QkNorm, RopeScaling};
use terrace_zero::MicroBatch;

#[test]
fn logits_of_every_position() {
    for (fixture, (backend, kernels)) in cases() {
        let worst = logits_error(&fixture, &mut fixture.runner(kernels, DType::F32));
        assert!(worst <= 1e-4, "{} on {backend}: logits are off by {worst}", fixture.name);
    }
}

/// A fixture, and what makes its model one without an option that it is there for.
type Change = (&'static str, fn(&mut ModelConfig));

const IGNORED: [Change; 132] = [
    ("llama2", |config| config.norm_eps = 1e-1),
    ("llama31", |config| config.rope.scaling = RopeScaling::Default),
    ("llama_biased", |config| config.rope.scaling = RopeScaling::Default),
    ("llama_yarn", |config| config.rope.scaling = RopeScaling::Default),
    ("llama_yarn", |config| match &mut config.rope.scaling {
        RopeScaling::Yarn { attention_factor, .. } => *attention_factor = 1.0,
        other => panic!("{other:?}"),
    }),
    ("mistral", |config| config.windows = vec![None; config.layers]),
    ("qwen2", |config| config.windows = vec![None; config.layers]),
    ("qwen3", |config| config.rope.theta = 10_000.0),
    ("phi3", |config| config.windows = vec![None; config.layers]),
    ("phi3_long", |config| config.rope.size = 4),
    ("phi3_long", |config| match &mut config.rope.scaling {
        RopeScaling::Long { original_positions, .. } => *original_positions = 64,
        other => panic!("{other:?}"),
    }),
    ("phi3_long", |config| match &mut config.rope.scaling {
        RopeScaling::Long { attention_factor, .. } => *attention_factor = 1.0,
        other => panic!("{other:?}"),
    }),
    ("seed_oss", |config| config.rope.theta = 100.0),
    ("smollm3", |config| config.windows = vec![None; config.layers]),
    ("smollm3", |config| config.unrotated.clear()),
    ("olmo2", |config| config.rope.theta = 100.0),
    ("olmo3", |config| config.window_rope = None),
    ("olmo3", |config| config.rope.scaling = RopeScaling::Default),
    ("olmo3", |config| config.windows = vec![None; config.layers]),
    ("granite", |config| config.multipliers.embedding = 1.0),
    ("granite", |config| config.multipliers.residual = 1.0),
    ("granite", |config| config.multipliers.attention = None),
    ("granite", |config| config.multipliers.logits = 1.0),
    ("gemma", |config| config.norm_plus_one = false),
    ("gemma", |config| config.multipliers.embedding = 1.0),
    ("gemma2", |config| config.score_cap = None),
    ("gemma2", |config| config.score_cap = Some(1.6)),
    ("gemma2", |config| config.logit_cap = None),
    ("gemma2", |config| config.norm_plus_one = false),
    ("gemma2", |config| config.multipliers.attention = None),
    ("gemma2", |config| config.multipliers.embedding = 1.0),
    ("gemma2", |config| config.windows = vec![None; config.layers]),
    ("gemma3", |config| config.norm_plus_one = false),
    ("gemma3", |config| config.window_rope = None),
    ("gemma3", |config| config.multipliers.attention = None),
    ("gemma3", |config| config.windows = vec![None; config.layers]),
    ("gemma4", |config| config.norm_plus_one = true),
    ("gemma4", |config| config.windows[0] = Some(64)),
    ("gemma4", |config| config.window_rope.as_mut().unwrap().theta = 100.0),
    ("gemma4", |config| config.rope.scaling = RopeScaling::Default),
    ("gemma4", |config| config.rope.scaling = RopeScaling::Proportional { pairs: 4, factor: 1.0 }),
    ("gemma4", |config| config.multipliers.attention = None),
    ("gemma4", |config| config.multipliers.embedding = 1.0),
    ("gemma4", |config| config.has_layer_scales = false),
    ("gemma4", |config| config.logit_cap = None),
    ("gemma4_moe", |config| mixture(config).chosen = 1),
    ("gemma4_moe", |config| config.norm_eps = 1e-1),
    ("gemma4_vision", |config| config.value_norm = false),
    ("gemma4_vision", |config| config.has_layer_scales = false),
    ("exaone4", |config| config.windows = vec![None; config.layers]),
    ("exaone4", |config| config.unrotated.clear()),
    ("exaone4", |config| config.qk_norm = None),
    ("glm", |config| config.rope_pairs = RopePairs::Halves),
    ("glm", |config| config.qkv_bias = false),
    ("glm4", |config| config.rope.size = config.head_size),
    ("glm4", |config| config.rope_pairs = RopePairs::Halves),
    ("glm4", |config| config.norms = Norms::Before),
    ("ernie4_5", |config| config.rope_pairs = RopePairs::Halves),
    ("ernie4_5", |config| config.rope.theta = 100.0),
    ("ernie4_5_moe", |config| mixture(config).has_score_biases = false),
    ("ernie4_5_moe", |config| mixture(config).normalize = false),
    ("ernie4_5_moe", |config| mixture(config).shared = None),
    ("cohere", |config| config.norm_centers = false),
    ("cohere", |config| config.norm_eps = 1e-5),
    ("cohere", |config| config.multipliers.logits = 1.0),
    ("cohere", |config| config.rope_pairs = RopePairs::Halves),
    ("cohere2", |config| config.norm_centers = false),
    ("cohere2", |config| config.multipliers.logits = 1.0),
    ("cohere2", |config| config.windows = vec![None; config.layers]),
    ("cohere2", |config| config.unrotated.clear()),
    ("hunyuan", |config| config.rope.scaling = RopeScaling::Default),
    ("hunyuan", |config| config.qk_norm = Some(QkNorm::PerHead)),
    ("hunyuan_moe", |config| mixture(config).shared = None),
    ("hunyuan_moe", |config| mixture(config).normalize = false),
    ("mixtral", |config| config.windows = vec![None; config.layers]),
    ("mixtral", |config| mixture(config).normalize = false),
    ("mixtral", |config| mixture(config).chosen = 1),
    ("qwen3_moe", |config| mixture(config).chosen = 2),
    ("olmoe", |config| mixture(config).normalize = true),
    ("qwen2_moe", |config| config.windows = vec![None; config.layers]),
    ("qwen2_moe", |config| mixture(config).shared = None),
    ("qwen2_moe", |config| mixture(config).shared.as_mut().unwrap().is_gated = false),
    ("glm4_moe", |config| config.qk_norm = None),
    ("glm4_moe", |config| config.rope.size = config.head_size),
    ("glm4_moe", |config| mixture(config).scores = Scores::Softmax),
    ("glm4_moe", |config| mixture(config).has_score_biases = false),
    ("glm4_moe", |config| mixture(config).normalize = false),
    ("glm4_moe", |config| mixture(config).scale = 1.0),
    ("glm4_moe", |config| mixture(config).shared = None),
    ("glm4_moe_lite", |config| config.latent.as_mut().unwrap().pairs = RopePairs::Neighbours),
    ("deepseek_v2", |config| mixture(config).groups = None),
    ("deepseek_v2", |config| config.multipliers.attention = None),
    ("deepseek_v2", |config| config.latent.as_mut().unwrap().pairs = RopePairs::Halves),
    ("deepseek_v3", |config| mixture(config).groups = None),
    ("deepseek_v3", |config| mixture(config).groups.as_mut().unwrap().by = GroupScore::Largest),
    ("deepseek_v3", |config| config.qkv_bias = false),
    ("deepseek_v3", |config| config.rope.scaling = RopeScaling::Default),
    ("minimax_m2", |config| config.rope.size = config.head_size),
    ("minimax_m2", |config| mixture(config).has_score_biases = false),
    ("minimax_m2", |config| mixture(config).scores = Scores::Softmax),
    ("qwen3_5", |config| config.norm_plus_one = false),
    ("qwen3_5", |config| config.gated_attention = false),
    ("qwen3_5", |config| config.rope.size = config.head_size),
    ("qwen3_5_moe", |config| mixture(config).shared = None),
    ("qwen3_next", |config| mixture(config).normalize = false),
    ("qwen3_next", |config| mixture(config).shared = None),
    ("qwen3_next", |config| config.gated_attention = false),
    ("gpt_oss", |config| config.windows = vec![None; config.layers]),
    ("gpt_oss", |config| config.has_sinks = false),
    ("gpt_oss", |config| config.gate_function = GateFunction::Silu),
    ("gpt_oss", |config| config.output_bias = false),
    ("gpt_oss", |config| config.rope.scaling = RopeScaling::Default),
    ("gpt_oss", |config| mixture(config).biased = false),
    ("llama4", |config| config.chunks = vec![None; config.layers]),
    ("llama4", |config| config.chunks = vec![Some(8), None, Some(8)]),
    ("llama4", |config| config.unrotated.clear()),
    ("llama4", |config| config.rope_pairs = RopePairs::Halves),
    ("llama4", |config| config.rope.scaling = RopeScaling::Default),
    ("llama4", |config| config.qk_norm = None),
    ("llama4", |config| config.query_factor = None),
    ("llama4", |config| config.query_factor.as_mut().unwrap().first = 0),
    ("llama4", |config| config.query_factor.as_mut().unwrap().unrotated_alone = false),
    ("llama4", |config| mixture(config).weighs_inputs = false),
    ("llama4", |config| mixture(config).scores = Scores::Softmax),
    ("llama4", |config| mixture(config).normalize = true),
    ("llama4", |config| mixture(config).chosen = 1),
    ("llama4", |config| mixture(config).shared = None),
    ("llama4_vision", |config| config.chunks = vec![None; config.layers]),
    ("llama4_vision", |config| config.qk_norm = Some(QkNorm::PerRotatedHeadWithoutWeights)),
    ("ministral3", |config| config.rope.scaling = RopeScaling::Default),
    ("ministral3", |config| config.query_factor = None),
    ("qwen2_5_vl", |config| config.rope.theta = 10_000.0),
];

/// The canary: every option that a fixture is there for moves its logits far beyond the tolerance.
#[test]
fn logits_notice_every_option() {
    for (name, ignore) in IGNORED {
        let fixture = Fixture::new(name);
        let mut config = ModelConfig::from_folder(&fixture.folder).unwrap();
        ignore(&mut config);
        let mut source = fixture.weights();
        let mut runner = Runner::new(Model::new(config), reference::kernel_set(), DType::F32, &mut source);
        let worst = logits_error(&fixture, &mut runner);
        assert!(worst > 1e-2, "{name}: logits are off by only {worst}");
    }
}

fn mixture(config: &mut ModelConfig) -> &mut Mixture {
    config.mixture.as_mut().unwrap()
}

#[test]
fn greedy_ids_through_the_cache() {
    for (fixture, (backend, kernels)) in cases() {
        let greedy = fixture.json("greedy.json");
        let prompts: Vec<Vec<u32>> = numbers(&greedy["prompts"]);
        let expected: Vec<Vec<u32>> = numbers(&greedy["outputs"]);
        let mut runner = fixture.runner(kernels, DType::F32);
        let batches = fixture.batches(&runner.model.config);

        let rows: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
        let longest = rows.iter().map(|row| row.len()).max().unwrap();
        let mut cache = runner.cache(rows.len(), longest + expected[0].len());
        let mut next = best(&runner.generate(&batches.prefill(&rows, longest + 2).unwrap(), &mut cache));
        cache.lengths = rows.iter().map(|row| row.len()).collect();
        let mut outputs: Vec<Vec<u32>> = next.iter().map(|id| vec![*id]).collect();
        for _ in 1..expected[0].len() {
            let batch = batches.decode(&next, &cache.lengths).unwrap();
            next = best(&runner.generate(&batch, &mut cache));
            cache.lengths.iter_mut().for_each(|length| *length += 1);
            outputs.iter_mut().zip(&next).for_each(|(ids, id)| ids.push(*id));
        }
        assert_eq!(outputs, expected, "{} on {backend}", fixture.name);
    }
}

#[test]
fn greedy_ids_by_recomputing_everything() {
    for (fixture, (backend, kernels)) in cases() {
        let greedy = fixture.json("greedy.json");
        let mut rows: Vec<Vec<u32>> = numbers(&greedy["prompts"]);
        let expected: Vec<Vec<u32>> = numbers(&greedy["outputs"]);
        let prompt_lengths: Vec<usize> = rows.iter().map(Vec::len).collect();
        let mut runner = fixture.runner(kernels, DType::F32);
        let batches = fixture.batches(&runner.model.config);
        for _ in 0..expected[0].len() {
            let views: Vec<&[u32]> = rows.iter().map(Vec::as_slice).collect();
            let batch = batches.prefill(&views, 32).unwrap();
            let mut cache = runner.cache(rows.len(), 32);
            for (row, id) in rows.iter_mut().zip(best(&runner.generate(&batch, &mut cache))) {
                row.push(id);
            }
        }
        for ((row, prompt), expected) in rows.iter().zip(prompt_lengths).zip(expected) {
            assert_eq!(row[prompt..], expected, "{} on {backend}", fixture.name);
        }
    }
}

#[test]
fn a_prompt_in_two_parts_gives_the_logits_of_the_whole() {
    for (fixture, (backend, kernels)) in cases() {
        let ids = fixture.arrays("logits.safetensors")["input_ids"].ids();
        let mut runner = fixture.runner(kernels, DType::F32);
        let batches = fixture.batches(&runner.model.config);
        let row = &ids[..20];
        let mut cache = runner.cache(1, 24);
        let whole = runner.generate(&batches.prefill(&[row], 20).unwrap(), &mut cache);
        let mut cache = runner.cache(1, 24);
        runner.generate(&batches.prefill(&[&row[..13]], 13).unwrap(), &mut cache);
        cache.lengths = vec![13];
        let batch = batches.generate(&[&row[13..]], &[13], 10).unwrap();
        let parts = runner.generate(&batch, &mut cache);
        let off = furthest(&whole[0], &parts[0]);
        assert!(off <= 1e-5, "{} on {backend}: off by {off}", fixture.name);
    }
}

#[test]
fn gradients_of_the_first_step() {
    for (fixture, (backend, kernels)) in cases() {
        let mut runner = fixture.runner(kernels, DType::F32);
        let batches = fixture.batches(&runner.model.config);
        let step = steps(&fixture.json("train.json"), &batches).swap_remove(0);
        let (_, gradients) = forward_backward(&mut runner, &step);
        let expected = fixture.arrays("train.safetensors");
        for param in runner.params() {
            let expected = expected[&format!("grad.{}", param.name)].floats();
            let found = &gradients[&param.name];
            let off = furthest(found, &expected);
            assert!(off <= 2e-5, "{} on {backend}: gradient of {} is off by {off}", fixture.name, param.name);
            assert!(expected.iter().any(|g| *g != 0.0), "the gradient of {} is tested", param.name);
        }
    }
}

#[test]
fn ten_steps_of_adamw() {
    for (fixture, (backend, kernels)) in cases() {
        let name = format!("{} on {backend}", fixture.name);
        let train = fixture.json("train.json");
        let trained = train_all(&fixture, kernels, DType::F32);
        close(&name, "loss", &trained.losses, &numbers(&train["losses"]), 1e-4);
        close(&name, "gradient norm", &trained.norms, &numbers(&train["grad_norms"]), 1e-3);
        let expected = fixture.arrays("train.safetensors");
        for (tensor, state) in trained.states {
            let expected = expected[&format!("final.{tensor}")].floats();
            let found: Vec<f32> = state.master.iter().map(|v| *v as f32).collect();
            let off = furthest(&found, &expected);
            assert!(off <= 1e-3, "{name}: final {tensor} is off by {off}");
        }
    }
}

/// Both sides round activations to bf16, but at different places; a step's loss agrees to about half a percent.
#[test]
fn ten_steps_in_bf16() {
    for (fixture, (backend, kernels)) in cases() {
        let name = format!("{} on {backend}", fixture.name);
        let train = fixture.json("train.json");
        let trained = train_all(&fixture, kernels, DType::BF16);
        close(&name, "bf16 loss", &trained.losses, &numbers(&train["losses_bf16"]), 5e-3);
        close(&name, "bf16 gradient norm", &trained.norms, &numbers(&train["grad_norms_bf16"]), 3e-2);
    }
}

#[test]
fn evaluation_sums_the_losses_of_training() {
    for (fixture, (backend, kernels)) in cases() {
        let mut runner = fixture.runner(kernels, DType::F32);
        let batches = fixture.batches(&runner.model.config);
        let step = steps(&fixture.json("train.json"), &batches).swap_remove(0);
        for batch in &step {
            let trained = runner.train(batch, 1.0, &mut HashMap::new());
            let evaluated = runner.evaluate(batch);
            assert_eq!(trained, evaluated, "{} on {backend}", fixture.name);
        }
    }
}

/// Largest error of any logit at any position, each computed as the last of a prompt.
fn logits_error(fixture: &Fixture, runner: &mut Runner) -> f32 {
    let arrays = fixture.arrays("logits.safetensors");
    let (ids, expected) = (arrays["input_ids"].ids(), arrays["logits"].floats());
    let [sequences, length, vocab] = arrays["logits"].shape[..] else { panic!("three dimensions") };
    // The prefixes stand for positions of the whole.
    let batches = fixture.batches(&runner.model.config).reaching(length);
    let mut worst = 0f32;
    for end in 1..=length {
        let rows: Vec<&[u32]> = ids.chunks(length).map(|row| &row[..end]).collect();
        let batch = batches.prefill(&rows, length).unwrap();
        let mut cache = runner.cache(sequences, length);
        for (b, logits) in runner.generate(&batch, &mut cache).iter().enumerate() {
            let row = (b * length + end - 1) * vocab;
            worst = worst.max(furthest(logits, &expected[row..row + vocab]));
        }
    }
    worst
}

struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    states: HashMap<String, State>,
}

/// All steps of the fixture with masters in f64 and weights in `dtype`.
fn train_all(fixture: &Fixture, kernels: KernelSet, dtype: DType) -> Trained {
    let masters = fixture.runner(kernels.clone(), DType::F32);
    let mut runner = fixture.runner(kernels, dtype);
    let params = runner.params();
    let mut states: HashMap<String, State> = HashMap::new();
    for param in &params {
        let bytes = masters.weight_bytes(&param.name).as_chunks::<4>().0;
        let values: Vec<f32> = bytes.iter().map(|b| f32::from_le_bytes(*b)).collect();
        states.insert(param.name.clone(), State::new(&values));
    }
    let batches = fixture.batches(&runner.model.config);
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for (index, step) in steps(&fixture.json("train.json"), &batches).iter().enumerate() {
        let (loss, gradients) = forward_backward(&mut runner, step);
        let norm = adamw::norm(params.iter().map(|param| &gradients[&param.name]));
        for param in &params {
            let state = states.get_mut(&param.name).unwrap();
            state.step(&gradients[&param.name], adamw::clip_factor(norm), index as i32 + 1);
            let values: Vec<f32> = state.master.iter().map(|v| *v as f32).collect();
            runner.set(param, &values);
        }
        losses.push(loss);
        norms.push(norm);
    }
    Trained { losses, norms, states }
}

/// Mean loss and its gradients over a step's micro-batches.
fn forward_backward(runner: &mut Runner, step: &[MicroBatch]) -> (f64, HashMap<String, Vec<f32>>) {
    let terms: u64 = step.iter().map(|batch| batch.loss_terms).sum();
    let mut gradients = HashMap::new();
    let losses = step.iter().map(|batch| runner.train(batch, 1.0 / terms as f32, &mut gradients));
    let loss: f64 = losses.sum();
    (loss / terms as f64, gradients)
}

fn cases() -> impl Iterator<Item = (Fixture, (&'static str, KernelSet))> {
    Fixture::all().flat_map(|fixture| {
        let name = fixture.name;
        backends().into_iter().map(move |backend| (Fixture::new(name), backend))
    })
}

fn best(logits: &[Vec<f32>]) -> Vec<u32> {
    let argmax = |row: &Vec<f32>| {
        let best = row.iter().enumerate().max_by(|(_, a), (_, b)| a.total_cmp(b));
        best.unwrap().0 as u32
    };
    logits.iter().map(argmax).collect()
}

/// Largest absolute difference; NaN counts as infinite.
pub fn furthest(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let differences = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    differences.map(|d| if d.is_nan() { f32::INFINITY } else { d }).fold(0.0, f32::max)
}

fn close(name: &str, what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{name}: number of steps");
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let off = (found - expected).abs() / expected.abs();
        assert!(off <= tolerance, "{name}: {what} of step {step} is {found}, torch has {expected} ({off:e})");
    }
}
