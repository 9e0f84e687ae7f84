//! Quantized weights through the engine: what they do to logits, where they may lie, what they weigh, what is refused.

use crate::card;
use crate::fixture::Fixture;
use crate::gpt_oss;
use crate::parity::furthest;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::engine::{EngineConfig as IoConfig, open_default};
use terrace_device::host::HostDevice;
use terrace_kernels::{DType, QuantFormat, cpu};
use terrace_models::{Model, ModelConfig, RandomSource, SafetensorsSource, TokenBatch};
use terrace_tiers::Tier;
use terrace_zero::{
    Backend, BatchLimits, Engine, EngineConfig, ParamSpec, Placement, Result, TrainingConfig, WeightSource,
    WindowOverrides,
};

const FORMATS: [QuantFormat; 3] = [QuantFormat::Int8, QuantFormat::Int4, QuantFormat::Mxfp4];

/// Two prompts, and the tokens that follow them.
const PROMPTS: [[u32; 6]; 2] = [[3, 14, 15, 9, 26, 5], [35, 8, 9, 79, 3, 2]];
const NEXT: [[u32; 2]; 3] = [[7, 11], [40, 41], [5, 90]];

/// One way to run the same model.
#[derive(Clone)]
struct Setup {
    model: ModelConfig,
    format: Option<QuantFormat>,
    dtype: DType,
    placement: Placement,
    discrete: bool,
    threads: usize,
    overrides: WindowOverrides,
}

impl Setup {
    fn new(model: ModelConfig, format: Option<QuantFormat>, dtype: DType) -> Self {
        let overrides = WindowOverrides::default();
        Self { model, format, dtype, placement: Placement::None, discrete: false, threads: 2, overrides }
    }

    fn config(&self, disks: Vec<PathBuf>) -> EngineConfig {
        let limits =
            BatchLimits { sequences: 2, length: 6, micro_batches: 1, cache_length: 12, cache_pages: 0 };
        EngineConfig {
            placement: self.placement,
            disks,
            threads: self.threads,
            overrides: self.overrides,
            ..EngineConfig::new(self.dtype, limits)
        }
    }

    fn backend(&self) -> Backend {
        let io = open_default(&IoConfig::default()).unwrap();
        card::backend(&io).unwrap_or_else(|| Backend {
            device: Arc::new(if self.discrete { HostDevice::discrete() } else { HostDevice::unified() }),
            kernels: cpu::kernel_set(self.threads),
            updates: None,
            kernel_scratch_bytes: cpu::scratch_bytes(self.threads) as u64,
            io,
        })
    }

    fn engine(&self, source: &mut dyn WeightSource, disks: Vec<PathBuf>) -> Result<Engine> {
        let model = Model::stored_as(self.model.clone(), self.format);
        let sample = TokenBatch::new(&model.config).blank(2, 6);
        Engine::create(self.config(disks), self.backend(), model.blocks, &sample, source)
    }

    /// Logits after the prompts and after each of the tokens that follow.
    fn logits(&self, source: &mut dyn WeightSource) -> Vec<f32> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mut engine = self.engine(source, vec![dir.path().to_owned()]).unwrap();
        let batches = TokenBatch::for_source(&self.model, source).unwrap();
        let mut cache = engine.new_cache(2).unwrap();
        let rows: Vec<&[u32]> = PROMPTS.iter().map(|row| &row[..]).collect();
        let mut all =
            engine.logits(&batches.prefill(&rows, 6).unwrap(), &mut cache, &[0, 1], &[6, 6]).unwrap();
        for next in NEXT {
            let batch = batches.decode(&next, cache.lengths()).unwrap();
            all.extend(engine.logits(&batch, &mut cache, &[0, 1], &[1, 1]).unwrap());
        }
        all
    }
}

/// Gives what is left of weights after quantizing them.
struct ThereAndBack<S> {
    source: S,
    format: QuantFormat,
    /// Names of those that are.
    quantized: HashSet<String>,
}

impl<S> ThereAndBack<S> {
    fn new(source: S, model: &ModelConfig, format: QuantFormat) -> Self {
        let stored = Model::stored_as(model.clone(), Some(format));
        let params = stored.blocks.iter().flat_map(|block| block.params());
        let quantized = params.filter(|param| param.quantized.is_some()).map(|param| param.name.clone());
        Self { source, format, quantized: quantized.collect() }
    }
}

impl<S: WeightSource> WeightSource for ThereAndBack<S> {
    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [f32]) -> Result {
        if !self.quantized.contains(&param.name) {
            return self.source.read(param, start, out);
        }
        let cols = *param.dims.last().unwrap();
        let mut all = vec![0.0; param.elements()];
        self.source.read(param, 0, &mut all)?;
        let mut codes = vec![0; self.format.row_bytes(cols)];
        for row in all.chunks_mut(cols) {
            self.format.quantize(row, &mut codes).unwrap();
            self.format.dequantize(&codes, row);
        }
        out.copy_from_slice(&all[start..start + out.len()]);
        Ok(())
    }
}

fn is_linear(name: &str) -> bool {
    name.ends_with("_proj.weight") || name == "lm_head.weight"
}

/// Rows of more than one block, some of them not whole, biases, and a head of its own unless tied.
pub(crate) fn wide(tied: bool) -> ModelConfig {
    ModelConfig::parse(&format!(
        r#"{{"architectures":["LlamaForCausalLM"],"vocab_size":101,"hidden_size":192,"intermediate_size":328,
        "num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,"max_position_embeddings":64,
        "attention_bias":true,"initializer_range":0.08,"tie_word_embeddings":{tied}}}"#
    ))
    .unwrap()
}

/// Rows in the order of the dense product give its bits (inner sizes are multiples of 16), others round differently.
#[test]
fn a_model_is_that_of_its_dequantized_weights() {
    for format in FORMATS {
        for fixture in Fixture::all() {
            let model = ModelConfig::from_folder(&fixture.folder).unwrap();
            let open = || fixture.weights();
            let quantized = Setup::new(model.clone(), Some(format), DType::F32).logits(&mut open());
            let plain = Setup::new(model.clone(), None, DType::F32);
            let dense = plain.logits(&mut ThereAndBack::new(open(), &model, format));
            let off = furthest(&quantized, &dense);
            assert!(off <= 1e-5, "{} in {format}: off by {off}", fixture.name);
            assert!(
                furthest(&dense, &plain.logits(&mut open())) > 1e-3,
                "{format} does change {}",
                fixture.name
            );
        }
        let model = wide(false);
        let source = RandomSource::for_config(&model, 1);
        let quantized = Setup::new(model.clone(), Some(format), DType::F32).logits(&mut source.clone());
        let mut back = ThereAndBack::new(source, &model, format);
        let dense = Setup::new(model, None, DType::F32).logits(&mut back);
        let off = furthest(&quantized, &dense);
        assert!(off <= 1e-4, "wide in {format}: off by {off}");
    }
}

/// The root mean square of the change, as a part of that of the logits. The error of a weight is 0.082 of the deviation of its
/// tensor in int4; fourteen matrices of independent errors one after the other make 0.31 of that, and these small models with
/// wide random weights are sharper than trained ones. In int8 it is 0.02, of which bf16 activations are a part.
#[test]
fn logits_stay_close() {
    for fixture in Fixture::all() {
        let model = ModelConfig::from_folder(&fixture.folder).unwrap();
        let open = || fixture.weights();
        // A token that hardly prefers its experts to others goes through these.
        let [int8, int4] = if model.mixture.is_some() { [0.2, 0.8] } else { [0.04, 0.5] };
        let cases = [(QuantFormat::Int8, int8), (QuantFormat::Int4, int4), (QuantFormat::Mxfp4, 1.2 * int4)];
        for (dtype, (format, bound)) in
            [DType::BF16, DType::F16].into_iter().flat_map(|d| cases.map(|c| (d, c)))
        {
            let plain = Setup::new(model.clone(), None, dtype).logits(&mut open());
            let found = Setup::new(model.clone(), Some(format), dtype).logits(&mut open());
            let mean = |values: &mut dyn Iterator<Item = f32>| {
                (values.map(|v| f64::from(v).powi(2)).sum::<f64>() / plain.len() as f64).sqrt()
            };
            let change =
                mean(&mut plain.iter().zip(&found).map(|(a, b)| a - b)) / mean(&mut plain.iter().copied());
            assert!(change > 0.0 && change <= bound, "{} in {dtype:?} and {format}: {change}", fixture.name);
        }
    }
}

/// gpt-oss as it is published: what its files hold is what is computed with, and nothing else is in that format.
#[test]
fn published_experts_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    gpt_oss::write_published(folder.path());
    let model = Model::from_folder(folder.path()).unwrap();
    let stored = Model::stored_as(model.config.clone(), Some(QuantFormat::Mxfp4));
    let params = stored.blocks.iter().flat_map(|block| block.params());
    for param in params {
        let is_expert = param.name.contains(".experts.") && param.name.ends_with(".weight");
        assert_eq!(param.quantized.is_some(), is_expert, "{}", param.name);
    }
    let open = || SafetensorsSource::for_model(folder.path(), &model).unwrap();
    let plain = Setup::new(model.config.clone(), None, DType::F32).logits(&mut open());
    for (format, most) in [(QuantFormat::Mxfp4, 1e-5), (QuantFormat::Int4, f32::INFINITY)] {
        let found = Setup::new(model.config.clone(), Some(format), DType::F32).logits(&mut open());
        let off = furthest(&found, &plain);
        assert!(off <= most && (most < 1.0 || off > 1e-3), "{format}: off by {off}");
    }
}

#[test]
fn placement_changes_no_bit() {
    for tied in [false, true] {
        for format in FORMATS {
            let base = Setup::new(wide(tied), Some(format), DType::BF16);
            let run = |setup: &Setup| setup.logits(&mut RandomSource::for_config(&setup.model, 1));
            let expected = run(&base);
            let small = WindowOverrides {
                weight_slots: Some(1),
                chunk_elements: Some(4096),
                ..WindowOverrides::default()
            };
            let stay = |groups| WindowOverrides { device_groups: Some(groups), ..small };
            for placement in [Placement::None, Placement::Host, Placement::Disk] {
                for (discrete, threads, overrides) in [
                    (false, 1, WindowOverrides::default()),
                    (false, 3, small),
                    (true, 2, small),
                    (true, 1, stay(0)),
                    (true, 1, stay(2)),
                ] {
                    let setup = Setup { placement, discrete, threads, overrides, ..base.clone() };
                    assert!(
                        expected == run(&setup),
                        "{format}, {placement}, discrete {discrete}, tied {tied}"
                    );
                }
            }
            let other = Setup { format: None, ..base.clone() };
            assert!(expected != run(&other), "the canary: other weights give other bits");
        }
    }
}

/// What is planned, resident or on disk, is what the formats say: every group's parameters, each on a boundary of 64 bytes and
/// the group on one of 4096.
#[test]
fn the_plan_counts_codes() {
    for format in FORMATS {
        let model = wide(false);
        let groups: Vec<u64> = Model::stored_as(model.clone(), Some(format))
            .blocks
            .iter()
            .map(|block| {
                let bytes = |param: &ParamSpec| {
                    let elements = param.elements();
                    let bytes = if is_linear(&param.name) {
                        let cols = param.dims[1];
                        elements / cols
                            * cols.div_ceil(128)
                            * if format == QuantFormat::Int8 { 136 } else { 72 }
                    } else {
                        2 * elements
                    };
                    bytes.next_multiple_of(64) as u64
                };
                block.params().iter().map(bytes).sum::<u64>().next_multiple_of(4096)
            })
            .collect();
        let plan = |placement| {
            let setup = Setup { placement, ..Setup::new(model.clone(), Some(format), DType::BF16) };
            let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let mut source = RandomSource::for_config(&model, 1);
            let engine = setup.engine(&mut source, vec![dir.path().to_owned()]).unwrap();
            engine.memory_plan().clone()
        };
        let of = |plan: &terrace_tiers::MemoryPlan, tier, purpose: &str| -> u64 {
            let entries = plan.entries().iter();
            entries
                .filter(|e| e.tier == tier && e.purpose.starts_with(purpose))
                .map(terrace_tiers::PlanEntry::bytes)
                .sum()
        };
        assert_eq!(of(&plan(Placement::Host), Tier::Host, "resident state"), groups.iter().sum::<u64>());
        let on_disk = plan(Placement::Disk);
        let stored = of(&on_disk, Tier::Disk, "weights");
        let least = groups.iter().sum::<u64>();
        // Volumes are cut into stripes of 1 MiB.
        assert!(stored >= least && stored <= least + (2 << 20), "{stored} for {least}");
        // Three equal layers share slots; the two ends are smaller and have their own.
        let slots = of(&on_disk, Tier::Host, "weights in flight");
        assert!(slots >= groups[1] && slots <= least, "{slots} of {groups:?}");
    }
}

/// One weight that is not finite.
struct Spoiled(RandomSource, &'static str, usize);

impl WeightSource for Spoiled {
    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [f32]) -> Result {
        self.0.read(param, start, out)?;
        if param.name == self.1 && (start..start + out.len()).contains(&self.2) {
            out[self.2 - start] = f32::NAN;
        }
        Ok(())
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let setup = Setup::new(wide(true), Some(QuantFormat::Int4), DType::BF16);
    let name = "model.layers.1.mlp.down_proj.weight";
    let mut spoiled = Spoiled(RandomSource::new(1), name, 192 * 328 - 3);
    let error = setup.engine(&mut spoiled, Vec::new()).unwrap_err().to_string();
    for part in [name, "element 62973", "NaN", "int4", "models::build"] {
        assert!(error.contains(part), "{error}");
    }

    let model = Model::stored_as(setup.model.clone(), setup.format);
    let sample = TokenBatch::new(&model.config).blank(2, 6);
    let config = EngineConfig { training: Some(TrainingConfig::default()), ..setup.config(Vec::new()) };
    let error = Engine::create(config, setup.backend(), model.blocks, &sample, &mut RandomSource::new(1))
        .unwrap_err();
    let error = error.to_string();
    assert!(error.contains("q_proj.weight") && error.contains("cannot be trained"), "{error}");

    let mut engine = setup.engine(&mut RandomSource::new(1), Vec::new()).unwrap();
    let error = engine.weights().err().expect("codes are no weights").to_string();
    assert!(error.contains("int4") && error.contains("cannot be exported"), "{error}");
}
