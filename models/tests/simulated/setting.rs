//! What a seed stands for: a training, and the lives it is cut into, each with a way to run and with some trouble.

use crate::dice::Dice;
use crate::support::{LR, Setup};
use crate::world::{Mood, Pace};
use std::path::PathBuf;
use std::sync::Arc;
use terrace_aio::IoErrorKind;
use terrace_aio::engine::SimConfig;
use terrace_aio::layer::Action;
use terrace_device::host::HostDevice;
use terrace_device::sim::SimDeviceConfig;
use terrace_kernels::DType;
use terrace_models::ModelConfig;
use terrace_optimizer::{Algorithm, GroupRule, Lion, LossScaleConfig, StateFormat};
use terrace_zero::{Accumulation, Durability, Placement, StepRates, WindowOverrides};

/// Steps of every training.
pub const STEPS: u64 = 6;

/// Blocks that may keep: the decoder layers.
const LAYERS: usize = 2;
/// Those of a deep model, which have several chunks each: enough for what runs beside backward to fall behind it.
const DEEP_LAYERS: usize = 8;

/// All that numbers may depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Training {
    pub tied: bool,
    pub clips: Clips,
    pub format: Format,
    pub micro_batches: usize,
    /// Some parameters are not trained.
    pub freezes: bool,
    /// Of more layers, which are larger.
    pub is_deep: bool,
    /// Rates and betas are other ones in every step.
    pub has_schedule: bool,
    pub rule: Rule,
    /// In stages.
    pub has_experts: bool,
}

/// The optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    AdamW,
    /// With one kind of moments, and no kernel for it on a card.
    Lion,
}

/// Which steps are clipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Clips {
    None,
    /// With a limit that about half of the gradients are within.
    Some,
    /// None, though the norm is asked for.
    Never,
    All,
}

/// Types of weights and state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    Split,
    Bf16,
    Compact,
    F32,
    /// With a loss scale, from which the first steps overflow.
    F16,
}

/// What a seed stands for.
#[derive(Debug, Clone)]
pub struct Setting {
    pub seed: u64,
    pub training: Training,
    pub disks: Vec<PathBuf>,
    /// How the directories share the state, if not equally.
    pub disk_weights: Option<Vec<f64>>,
    pub disk: SimConfig,
    /// The state is kept once, by every process.
    pub once: bool,
    /// One process after the other. The last one has no trouble.
    pub lives: Vec<Life>,
}

/// One process.
#[derive(Debug, Clone)]
pub struct Life {
    pub placement: Placement,
    /// A card of its own, or the CPU.
    pub card: Option<SimDeviceConfig>,
    pub threads: usize,
    pub overrides: WindowOverrides,
    /// Most memory for copies of state on disk.
    pub cache_bytes: u64,
    pub durability: Durability,
    pub accumulation: Accumulation,
    /// As little memory as the plan can do with.
    pub is_tight: bool,
    pub mood: Mood,
    pub trouble: Trouble,
    /// State that is not on disk, or waits for it, is saved after these steps.
    pub saves: [bool; STEPS as usize + 1],
    /// After which steps their weights are read beside the next ones.
    pub exports: [bool; STEPS as usize + 1],
    /// Evaluated after these steps, which needs all updates done.
    pub evaluates: [bool; STEPS as usize + 1],
    /// All weights are read after these steps, for which the same holds.
    pub looks: [bool; STEPS as usize + 1],
    /// The engine goes on after a request that failed.
    pub perseveres: bool,
    /// A save beside the steps is waited for before weights are used otherwise.
    pub is_patient: bool,
    /// What is read beside the steps is read at leisure.
    pub has_slow_readers: bool,
    /// How many eighths of what lies between the least memory a plan can do with and the most that it can use there are, of the host's
    /// and of the card's.
    pub host_eighths: Option<u64>,
    pub card_eighths: Option<u64>,
    /// The part of the update that is the host's beside a card.
    pub host_part: Option<f64>,
    /// How the directories are to share what this process makes there, if not as those of the setting.
    pub disk_weights: Option<Vec<f64>>,
}

/// What ends a process before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    None,
    /// It ends after a step, well or as a panic ends it.
    Stop {
        step: u64,
        is_lost: bool,
    },
    /// A request fails.
    Fail {
        action: Action,
        nth: u64,
        kind: IoErrorKind,
    },
    /// The power goes, and the disk comes up as `image` says.
    Cut {
        after: u64,
        image: u64,
    },
}

impl Training {
    fn of(dice: &mut Dice) -> Self {
        Self {
            tied: dice.one_in(2),
            clips: if dice.one_in(2) { Clips::All } else { Clips::None },
            format: dice.pick(&[Format::Split, Format::Split, Format::Compact, Format::F32, Format::F16]),
            micro_batches: dice.pick(&[1, 2, 2, 3]),
            freezes: dice.one_in(4),
            is_deep: false,
            has_schedule: false,
            has_experts: false,
            rule: Rule::AdamW,
        }
    }

    /// What a schedule says about the step after `step`.
    pub fn rates(self, step: u64) -> StepRates {
        if !self.has_schedule {
            return LR.into();
        }
        let part = step as f64 / STEPS as f64;
        StepRates { lr: LR * (1.0 - part), betas: (step % 3 != 1).then_some((0.95 - 0.1 * part, 0.99)) }
    }

    /// The training in memory, one thing after the other: what everything is compared with.
    pub fn plain(self) -> Setup {
        let mut setup = Setup::new(self.tied);
        // Whatever card this machine has.
        setup.device = Some(Arc::new(HostDevice::unified()));
        let overrides =
            WindowOverrides { kept_blocks: Some(0), overlap: Some(false), ..WindowOverrides::default() };
        setup.model = tiny_model(self);
        setup.micro_batches = self.micro_batches;
        setup.clip = match self.clips {
            Clips::None => None,
            Clips::Some => Some([1.8, 1.27, 1.04, 0.9, 0.8][self.micro_batches - 1]),
            Clips::Never => Some(1e6),
            Clips::All => Some(0.5),
        };
        setup.overrides = overrides;
        (setup.dtype, setup.state) = match self.format {
            Format::Split => (DType::BF16, StateFormat::Split),
            Format::Bf16 => (DType::BF16, StateFormat::Bf16),
            Format::Compact => (DType::BF16, StateFormat::Compact),
            Format::F32 => (DType::F32, StateFormat::Fp32),
            Format::F16 => (DType::F16, StateFormat::Fp32),
        };
        if self.rule == Rule::Lion {
            setup.optimizer = Algorithm::Lion(Lion { weight_decay: 0.1, ..Lion::default() });
        }
        if self.format == Format::F16 {
            setup.loss_scale = Some(LossScaleConfig {
                initial_scale_power: 21,
                hysteresis: 1,
                loss_scale_window: 1,
                ..LossScaleConfig::default()
            });
        }
        if self.freezes {
            setup.groups = vec![
                GroupRule::new("*.1.self_attn.k_proj*").frozen(),
                GroupRule::new("*norm*").weight_decay(0.0),
            ];
        }
        setup
    }
}

impl Setting {
    pub fn of(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let dice = &mut dice;
        let mut training = Training::of(dice);
        let disks: Vec<_> =
            (0..dice.pick(&[1, 1, 2, 3])).map(|i| PathBuf::from(format!("/sim/disk{i}"))).collect();
        let disk_weights =
            (disks.len() > 1 && dice.one_in(2)).then(|| (0..disks.len()).map(|i| 1.0 + i as f64).collect());
        let disk = SimConfig {
            seed: dice.next(),
            block_bytes: dice.pick(&[16 << 10, 64 << 10, 256 << 10]),
            queue_depth: dice.pick(&[1, 2, 4, 32, 128]),
            transfer_bytes_max: dice.pick(&[8 << 10, 100_000, usize::MAX, usize::MAX]),
            short_one_in: dice.pick(&[0, 4, 16]),
            interrupt_one_in: dice.pick(&[0, 8, 32]),
            delay_ticks_max: dice.pick(&[0, 3, 16, 200]),
            sector_bytes: dice.pick(&[1, 512, 4096]),
            ..SimConfig::default()
        };
        // The cut into chunks is that of the first life. Plans that are as tight as can be are made for a cut that is known.
        let chunk_elements = dice.pick(&[None, Some(1 << 14), Some(1 << 14), Some(1 << 15)]);
        let troubles = dice.pick(&[0, 1, 1, 1, 2, 3]);
        let mut lives: Vec<_> =
            (0..=troubles).map(|i| Life::of(dice, chunk_elements, i < troubles)).collect();
        // Dice of their own: what else a seed stands for does not depend on it.
        let mut exporting = Dice::new(seed ^ 0x6578_706f);
        if exporting.one_in(2) {
            lives
                .iter_mut()
                .flat_map(|life| &mut life.exports)
                .for_each(|export| *export = exporting.one_in(3));
        }
        let once = Dice::new(seed ^ 0x6f6e_6365).one_in(4);
        if training.clips == Clips::All && Dice::new(seed ^ 0x736f_6d65).one_in(2) {
            training.clips = Clips::Some;
        }
        let mut never = Dice::new(seed ^ 0x6e65_7665);
        if training.clips == Clips::Some && never.one_in(2) {
            training.clips = Clips::Never;
            for life in lives.iter_mut().filter(|life| life.placement == Placement::Disk) {
                // What runs before the norm is known may be far behind, and share the memory of gradients with what comes down from a card.
                life.overrides.update_slots = never.perhaps(&[3, 4, 6]).or(life.overrides.update_slots);
                if never.one_in(2) {
                    life.overrides.gradients_on_disk = Some(true);
                    life.card = life.card.or(Some(SimDeviceConfig::default()));
                }
            }
        }
        if training.format == Format::Split && Dice::new(seed ^ 0x6266_3136).one_in(3) {
            training.format = Format::Bf16;
        }
        let mut deep = Dice::new(seed ^ 0x6465_6570);
        if deep.one_in(6) {
            training.is_deep = true;
            // Whoever gives the state a cut gives it this one.
            let cut = lives[0].overrides.chunk_elements.map(|_| 1 << 14);
            let is_far_behind = deep.one_in(2);
            if is_far_behind {
                training.clips = deep.pick(&[Clips::Some, Clips::Never]);
            }
            for life in &mut lives {
                life.overrides.chunk_elements = cut;
                life.overrides.update_slots = deep.perhaps(&[1, 3, 4, 6]);
                life.overrides.kept_blocks = deep.perhaps(&[0, 3, DEEP_LAYERS]);
                if is_far_behind && life.placement == Placement::Disk {
                    // An update beside backward, with all memory there is for it.
                    life.overrides.update_slots = Some(deep.pick(&[3, 4, 6]));
                    life.overrides.gradients_on_disk = Some(true);
                    life.overrides.overlap = None;
                    life.card = life.card.or(Some(SimDeviceConfig::default()));
                }
            }
        }
        training.vary(&mut Dice::new(seed ^ 0x7661_7279));
        let mut varying = Dice::new(seed ^ 0x6c69_7665);
        let mut syncing = Dice::new(seed ^ 0x7379_6e63);
        for life in &mut lives {
            life.overrides.sync_ahead = Some(syncing.one_in(2));
            life.vary(&mut varying, chunk_elements.is_some(), disks.len());
            if training.rule == Rule::Lion {
                (life.overrides.state_groups, life.host_part) = (None, None);
            }
        }
        Self { seed, training, disks, disk_weights, disk, once, lives }
    }

    /// The same with all its lives in virtual time.
    pub fn timed(seed: u64) -> Self {
        let mut setting = Self::of(seed);
        for (life, number) in setting.lives.iter_mut().zip(0..) {
            life.mood = Mood::Timed(Pace::of(&mut Dice::new(!seed ^ number)));
        }
        setting
    }

    pub fn is_timed(&self) -> bool {
        self.lives.iter().any(|life| matches!(life.mood, Mood::Timed(_)))
    }

    /// How a life is run, but for the engines.
    pub fn setup(&self, life: &Life) -> Setup {
        Setup {
            placement: life.placement,
            disks: self.disks.clone(),
            disk_weights: life.disk_weights.clone().or_else(|| self.disk_weights.clone()),
            host_part: life.host_part,
            threads: life.threads,
            overrides: life.overrides,
            cache_bytes: life.cache_bytes,
            durability: if self.once { Durability::None } else { life.durability },
            accumulation: life.accumulation,
            ..self.training.plain()
        }
    }
}

impl Life {
    fn of(dice: &mut Dice, chunk_elements: Option<usize>, is_troubled: bool) -> Self {
        use Placement::{Disk, Host, None as Here};
        let placement = dice.pick(&[Disk, Disk, Disk, Disk, Host, Here]);
        let on_disk = placement == Disk;
        let card = dice.one_in(2).then(|| SimDeviceConfig {
            seed: dice.next(),
            early_one_in: dice.pick(&[0, 2, 2, 6]),
            lost_wait_one_in: 0,
        });
        let overrides = WindowOverrides {
            weight_slots: dice.perhaps(&[1, 1, 2, 3]),
            chunk_elements,
            update_slots: dice.perhaps(&[1, 2, 2, 3]),
            gradients_on_disk: dice.perhaps(&[true, false]).filter(|_| on_disk),
            activations_on_disk: dice.perhaps(&[true, false]).filter(|_| on_disk),
            signals_stay: dice.perhaps(&[true, false]),
            uploads_ahead: None,
            gradients_whole: None,
            kept_blocks: dice.perhaps(&[0, 1, LAYERS]),
            gradient_groups: dice.perhaps(&[1, 2, 3, 8]),
            copied_weights: None,
            copied_groups: None,
            device_groups: dice.perhaps(&[0, 1, 3]),
            state_groups: dice.perhaps(&[0, 1, 3]),
            overlap: dice.perhaps(&[true, true, false]),
            // Nothing is generated.
            kv_on_device: None,
            kv_on_host: None,
            packed_bytes: dice.perhaps(&[0, 4096, 1 << 20]),
            sync_ahead: None,
            kept_on_host: dice.perhaps(&[0, 1, LAYERS]),
            kept_on_disk: dice.perhaps(&[0, 1, LAYERS]),
            kept_slots: dice.perhaps(&[1, 3, 1000]),
        };
        Self {
            placement,
            card,
            threads: dice.pick(&[1, 1, 2]),
            overrides,
            // Of some 50 thousand parameters.
            cache_bytes: dice.pick(&[0, 0, 20_000, 80_000, 200_000, u64::MAX]),
            durability: dice.pick(&[Durability::Step, Durability::Step, Durability::Checkpoint]),
            accumulation: dice.pick(&[
                Accumulation::Vertical,
                Accumulation::Vertical,
                Accumulation::Horizontal,
            ]),
            is_tight: chunk_elements.is_some() && dice.one_in(4),
            mood: dice.pick(&[Mood::Eager, Mood::Yielding, Mood::Sleepy, Mood::Lazy]),
            trouble: if is_troubled { Trouble::of(dice) } else { Trouble::None },
            saves: std::array::from_fn(|_| dice.one_in(2)),
            exports: [false; STEPS as usize + 1],
            evaluates: std::array::from_fn(|_| dice.one_in(8)),
            looks: [false; STEPS as usize + 1],
            perseveres: false,
            is_patient: true,
            has_slow_readers: false,
            host_eighths: None,
            card_eighths: None,
            host_part: None,
            disk_weights: None,
        }
    }

    /// Other choices, by dice of their own. Budgets are for a cut of the state that is known.
    fn vary(&mut self, dice: &mut Dice, has_cut: bool, disks: usize) {
        self.perseveres = dice.one_in(2);
        self.is_patient = dice.one_in(2);
        self.has_slow_readers = dice.one_in(4);
        let looks = dice.one_in(3);
        self.looks = std::array::from_fn(|_| dice.one_in(6) && looks);
        let eighths = [dice.below(9), dice.below(9)];
        if has_cut && !self.is_tight && dice.one_in(3) {
            // One of the two: the least of both is that of one plan.
            if self.card.is_some() && dice.one_in(2) {
                self.card_eighths = Some(eighths[0]);
            } else {
                self.host_eighths = Some(eighths[1]);
            }
            // Room for what a plan can do with it.
            if dice.one_in(2) {
                let Self { overrides, .. } = self;
                (overrides.weight_slots, overrides.update_slots, overrides.kept_blocks) = (None, None, None);
                (overrides.device_groups, overrides.state_groups, overrides.gradient_groups) =
                    (None, None, None);
            }
        }
        if self.placement != Placement::None && dice.one_in(4) {
            self.overrides.state_groups = None;
            self.host_part = Some(dice.pick(&[0.0, 0.3, 0.7, 1.0]));
        }
        if disks > 1 && dice.one_in(4) {
            self.disk_weights = Some((0..disks).map(|_| dice.pick(&[1.0, 1.0, 2.0, 5.0])).collect());
        }
        self.overrides.gradients_whole = dice.perhaps(&[true, false]);
        self.overrides.uploads_ahead = dice.perhaps(&[0, 1, 2]);
    }
}

impl Training {
    /// Other choices, by dice of their own.
    fn vary(&mut self, dice: &mut Dice) {
        self.has_schedule = dice.one_in(4);
        // Those of a deep model take their time.
        if dice.one_in(12) && !self.is_deep {
            self.micro_batches = 5;
        }
        if dice.one_in(8) {
            self.rule = Rule::Lion;
        }
        // Gradients of experts leave before their block's backward ends where there is one micro-batch.
        if dice.one_in(6) {
            self.has_experts = true;
            self.micro_batches = dice.pick(&[1, 1, self.micro_batches]);
        }
    }
}

impl Trouble {
    fn of(dice: &mut Dice) -> Self {
        match dice.below(8) {
            0 => Self::Stop { step: dice.below(STEPS + 1), is_lost: dice.one_in(2) },
            1..=3 => {
                let (action, kind) = dice.pick(&[
                    (Action::Read, IoErrorKind::Device),
                    (Action::Read, IoErrorKind::Device),
                    (Action::Write, IoErrorKind::Device),
                    (Action::Write, IoErrorKind::NoSpace),
                    (Action::Sync, IoErrorKind::Device),
                ]);
                let nth = if action == Action::Sync { dice.below(16) } else { early(dice, 256) };
                Self::Fail { action, nth, kind }
            }
            _ => Self::Cut { after: early(dice, 1024), image: dice.next() },
        }
    }
}

/// A number below `bound`, mostly far below: how many requests there will be differs from one setting to the next.
fn early(dice: &mut Dice, bound: u64) -> u64 {
    let bound = bound >> dice.below(6);
    dice.below(bound)
}

/// A Llama that costs next to nothing, but for embeddings of more than one chunk.
fn tiny_model(training: Training) -> ModelConfig {
    let Training { tied, is_deep, has_experts, .. } = training;
    let (layers, intermediate) = if is_deep { (DEEP_LAYERS, 400) } else { (LAYERS, 48) };
    let (class, of_experts) = match has_experts {
        false => ("LlamaForCausalLM", intermediate),
        true => ("Qwen3MoeForCausalLM", intermediate / 4),
    };
    let mut model = ModelConfig::parse(&format!(
        r#"{{"architectures":["{class}"],"vocab_size":533,"hidden_size":32,
        "intermediate_size":{intermediate},"num_hidden_layers":{layers},"num_attention_heads":2,"num_key_value_heads":1,
        "max_position_embeddings":64,"rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu",
        "num_experts":5,"num_experts_per_tok":2,"moe_intermediate_size":{of_experts},"tie_word_embeddings":{tied}}}"#
    ))
    .expect("a valid configuration");
    if let Some(mixture) = &mut model.mixture {
        mixture.experts_at_once = Some(2);
    }
    model
}
