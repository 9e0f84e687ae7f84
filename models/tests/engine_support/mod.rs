//! A small Llama and what it takes to train it, shared by the integration tests.
#![allow(dead_code, reason = "each test uses its part")]

#[path = "../card/mod.rs"]
pub mod card;
mod timed;

use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::engine::{EngineChoice, EngineConfig as IoConfig, open_default};
use terrace_aio::{IoEngine, VirtualClock};
use terrace_device::Device;
use terrace_device::host::HostDevice;
use terrace_kernels::{DType, cpu};
use terrace_models::{Model, ModelConfig, RandomSource, Row, TokenBatch};
use terrace_optimizer::{AdamW, Algorithm, GroupRule, LossScaleConfig, StateFormat, host_kernels};
use terrace_tiers::{Tier, TierError, checksum};
use terrace_zero::{
    Accumulation, Backend, BatchLimits, Durability, Engine, EngineConfig, EngineError, MicroBatch, ParamSpec,
    Placement, StepReport, TrainingConfig, WeightReader, WeightSource, WindowOverrides,
};

/// A Llama of some 100k parameters; tied when asked.
pub fn small_llama(tied: bool) -> ModelConfig {
    ModelConfig::parse(&format!(
        r#"{{"architectures":["LlamaForCausalLM"],"model_type":"llama","vocab_size":97,"hidden_size":48,
        "intermediate_size":112,"num_hidden_layers":3,"num_attention_heads":4,"num_key_value_heads":2,
        "max_position_embeddings":64,"rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu",
        "tie_word_embeddings":{tied}}}"#
    ))
    .expect("a valid configuration")
}

/// What batches bring: random numbers, and what multiplies layers is not 1.
struct Constants(RandomSource);

impl WeightSource for Constants {
    fn read(&mut self, constant: &ParamSpec, start: usize, out: &mut [f32]) -> terrace_zero::Result {
        self.0.read(constant, start, out)?;
        if constant.name.ends_with("layer_scalar") {
            out.fill(0.75);
        }
        Ok(())
    }
}

/// One way to run the same training.
#[derive(Clone)]
pub struct Setup {
    pub model: ModelConfig,
    pub placement: Placement,
    pub disks: Vec<PathBuf>,
    pub disk_weights: Option<Vec<f64>>,
    pub dtype: DType,
    pub state: StateFormat,
    pub optimizer: Algorithm,
    pub clip: Option<f64>,
    pub loss_scale: Option<LossScaleConfig>,
    pub host_part: Option<f64>,
    pub groups: Vec<GroupRule>,
    pub choice: EngineChoice,
    pub discrete: bool,
    /// Instead of the CPU, discrete or not, and of a card.
    pub device: Option<Arc<dyn Device>>,
    pub threads: usize,
    pub micro_batches: usize,
    pub accumulation: Accumulation,
    pub overrides: WindowOverrides,
    pub host_budget: u64,
    pub device_budget: u64,
    pub cache_bytes: u64,
    pub durability: Durability,
    pub io: Option<Arc<dyn IoEngine>>,
    /// A clock, and the seconds that an operation of a product takes of it.
    pub clock: Option<(Arc<VirtualClock>, f64)>,
    pub identity: String,
}

pub const SEQUENCES: usize = 2;
pub const LENGTH: usize = 17;
/// The rate of every step.
pub const LR: f64 = 3e-3;

impl Setup {
    pub fn new(tied: bool) -> Self {
        Self {
            model: small_llama(tied),
            placement: Placement::None,
            disks: Vec::new(),
            disk_weights: None,
            dtype: DType::BF16,
            state: StateFormat::Split,
            optimizer: AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }.into(),
            clip: Some(0.5),
            loss_scale: None,
            host_part: None,
            groups: Vec::new(),
            choice: EngineChoice::Threads,
            discrete: false,
            device: None,
            threads: 1,
            micro_batches: 2,
            accumulation: Accumulation::Vertical,
            overrides: WindowOverrides::default(),
            host_budget: 1 << 30,
            device_budget: u64::MAX,
            cache_bytes: 0,
            durability: Durability::Step,
            io: None,
            clock: None,
            identity: "{\"test\":1}".into(),
        }
    }

    pub fn on_disk(tied: bool, disks: Vec<PathBuf>) -> Self {
        Self { placement: Placement::Disk, disks, ..Self::new(tied) }
    }

    pub fn config(&self) -> EngineConfig {
        EngineConfig {
            dtype: self.dtype,
            training: Some(TrainingConfig {
                state: self.state,
                optimizer: self.optimizer,
                clip: self.clip,
                loss_scale: self.loss_scale,
                groups: self.groups.clone(),
                base_lr: LR,
                host_part: self.host_part,
            }),
            placement: self.placement,
            disks: self.disks.clone(),
            disk_weights: self.disk_weights.clone(),
            host_budget: self.host_budget,
            cache_bytes: self.cache_bytes,
            durability: self.durability,
            device_budget: self.device_budget,
            threads: self.threads,
            pinned: false,
            limits: BatchLimits {
                sequences: SEQUENCES,
                length: LENGTH,
                micro_batches: self.micro_batches,
                cache_length: 0,
                cache_pages: 0,
            },
            accumulation: self.accumulation,
            kv_tier: Tier::Device,
            keep_at_most: None,
            keep_on_host: 0,
            keep_on_disk: 0,
            // What a test counts does not depend on what its disk takes for a sync.
            overrides: WindowOverrides {
                sync_ahead: self.overrides.sync_ahead.or(Some(false)),
                ..self.overrides
            },
            timeline: None,
            identity: self.identity.clone(),
        }
    }

    pub fn backend(&self) -> Backend {
        let io = self.io.clone().unwrap_or_else(|| {
            open_default(&IoConfig { choice: self.choice, ..IoConfig::default() })
                .expect("the disk engine starts")
        });
        if self.device.is_none()
            && let Some(card) = card::backend(&io)
        {
            return card;
        }
        let device = self.device.clone().unwrap_or_else(|| {
            Arc::new(if self.discrete { HostDevice::discrete() } else { HostDevice::unified() })
        });
        let kernel_scratch_bytes = cpu::scratch_bytes(self.threads) as u64;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build().expect("threads start");
        let updates = Some(host_kernels(Arc::new(pool)));
        let kernels = cpu::kernel_set(self.threads);
        let kernels = match &self.clock {
            Some((clock, operation)) => timed::timed(kernels, clock, *operation),
            None => kernels,
        };
        Backend { device, kernels, updates, kernel_scratch_bytes, io }
    }

    /// The same on the CPU where all others are on a card: for what is planned for a device that shares the host's memory.
    #[must_use]
    pub fn on_cpu(&self) -> Self {
        let device = if self.discrete { HostDevice::discrete() } else { HostDevice::unified() };
        Self { device: Some(Arc::new(device)), ..self.clone() }
    }

    pub fn create(&self) -> Engine {
        self.try_create().unwrap_or_else(|e| panic!("{e}"))
    }

    pub fn try_create(&self) -> terrace_zero::Result<Engine> {
        let blocks = Model::new(self.model.clone()).blocks;
        let mut source = RandomSource::for_config(&self.model, 7);
        Engine::create(self.config(), self.backend(), blocks, &self.sample(), &mut source)
    }

    pub fn resume(&self) -> terrace_zero::Result<Engine> {
        let blocks = Model::new(self.model.clone()).blocks;
        Engine::resume(self.config(), self.backend(), blocks, &self.sample())
    }

    /// The same with as little host memory as the plan can do with.
    #[must_use]
    pub fn tight(&self) -> Self {
        let setup = Self { host_budget: 1, ..self.clone() };
        let blocks = Model::new(self.model.clone()).blocks;
        match Engine::plan_only(setup.config(), &setup.backend(), blocks, &setup.sample()) {
            Err(EngineError::Tier(TierError::Plan(refusal))) => {
                Self { host_budget: refusal.minimum, ..setup }
            }
            other => panic!("a budget of one byte is refused: {other:?}"),
        }
    }

    /// The same with so many eighths of what lies between the least memory of a tier that the plan can do with and the most it uses.
    #[must_use]
    pub fn between(&self, tier: Tier, eighths: u64) -> Self {
        let plan = |setup: &Self| {
            let blocks = Model::new(setup.model.clone()).blocks;
            Engine::plan_only(setup.config(), &setup.backend(), blocks, &setup.sample())
        };
        let with = |budget: u64| match tier {
            Tier::Device => Self { device_budget: budget, ..self.clone() },
            _ => Self { host_budget: budget, ..self.clone() },
        };
        let most = plan(self).unwrap_or_else(|e| panic!("{e}")).total(tier);
        let least = match plan(&with(0)) {
            Err(EngineError::Tier(TierError::Plan(refusal))) => refusal.minimum.min(most),
            Ok(_) => 0,
            Err(error) => panic!("{error}"),
        };
        let setup = with(least + (most - least) * eighths / 8);
        match plan(&setup) {
            Err(EngineError::Tier(TierError::Plan(refusal))) => with(refusal.minimum),
            _ => setup,
        }
    }

    pub fn sample(&self) -> MicroBatch {
        TokenBatch::new(&self.model).blank(SEQUENCES, LENGTH)
    }

    /// The micro-batches of step `step`; some rows are short, some labels masked.
    pub fn batches(&self, step: u64) -> Vec<MicroBatch> {
        let builder = TokenBatch::for_source(&self.model, &mut Constants(RandomSource::new(7)))
            .expect("random numbers");
        let vocab = self.model.vocab as u64;
        let mut state = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0xabcd;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        (0..self.micro_batches)
            .map(|m| {
                let rows: Vec<(Vec<u32>, Vec<i32>)> = (0..SEQUENCES)
                    .map(|s| {
                        let len = LENGTH - (m + s) % 3;
                        let ids: Vec<u32> = (0..len).map(|_| (next() % vocab) as u32).collect();
                        let labels = ids
                            .iter()
                            .enumerate()
                            .map(|(t, &id)| if t % 5 == 1 { -100 } else { id as i32 })
                            .collect();
                        (ids, labels)
                    })
                    .collect();
                let rows: Vec<Row<'_>> = rows.iter().map(|(ids, labels)| Row { ids, labels }).collect();
                builder.train(&rows, SEQUENCES, LENGTH).expect("rows fit")
            })
            .collect()
    }

    /// Trains from scratch for `steps` and gives the losses and a hash of all weights.
    pub fn run(&self, steps: u64) -> (Vec<f64>, u64) {
        let mut engine = self.create();
        let losses = self.continue_to(&mut engine, steps);
        (losses, weights_hash(&mut engine))
    }

    pub fn continue_to(&self, engine: &mut Engine, steps: u64) -> Vec<f64> {
        self.train_to(engine, steps).iter().map(|report| report.loss).collect()
    }

    /// As [`continue_to`](Self::continue_to), with all that steps report.
    pub fn train_to(&self, engine: &mut Engine, steps: u64) -> Vec<StepReport> {
        let mut reports = Vec::new();
        while engine.step() < steps {
            let report = engine.train_step(&self.batches(engine.step()), LR);
            reports.push(report.unwrap_or_else(|e| panic!("step: {e}")));
        }
        reports
    }
}

/// With one slot and one chunk in flight nothing is shared by chance, so that sums of what is moved are exact.
pub fn narrow() -> WindowOverrides {
    WindowOverrides {
        weight_slots: Some(1),
        chunk_elements: Some(1 << 14),
        update_slots: Some(1),
        ..WindowOverrides::default()
    }
}

/// A hash over every weight, in order.
pub fn weights_hash(engine: &mut Engine) -> u64 {
    hash_of(&mut engine.weights().unwrap()).expect("weights can be read")
}

/// The same of weights that are given out.
pub fn hash_of(reader: &mut dyn WeightReader) -> terrace_zero::Result<u64> {
    let all: Vec<u8> = all_of(reader)?.into_iter().flat_map(|(_, bytes)| bytes).collect();
    Ok(checksum(&all))
}

/// Every weight by name, in order.
pub fn weights(engine: &mut Engine) -> Vec<(String, Vec<u8>)> {
    all_of(&mut engine.weights().unwrap()).expect("weights can be read")
}

fn all_of(reader: &mut dyn WeightReader) -> terrace_zero::Result<Vec<(String, Vec<u8>)>> {
    let size = reader.dtype().size();
    let mut all = Vec::new();
    for param in reader.params() {
        let mut bytes = vec![0; param.elements() * size];
        reader.read(&param, 0, &mut bytes)?;
        all.push((param.name, bytes));
    }
    Ok(all)
}
