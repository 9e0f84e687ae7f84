//! The configuration of a Hugging Face model folder, checked and reduced to what the blocks need.
//!
//! Absent entries take the defaults of the family's configuration class in transformers, because `save_pretrained` may
//! leave them out. Everything that would change the numbers and is not computed here is refused by name; dropout and the like are the
//! exception: only training has them, so that whoever trains asks for them and refuses.

use crate::composite::{TEXT, language_model};
use crate::entries::Entries;
use crate::family::{Family, family};
use crate::fp8;
use crate::heads::{self, KvHeads, refuse_of_gemma4};
use crate::json::parse_json;
use crate::latent::LatentAttention;
use crate::mixture::Mixture;
use crate::rope::{QueryFactor, Rope, RopeScaling};
use crate::windows::Sights;
use crate::{ModelError, Result};
use serde_json::Value;
use std::path::Path;
use terrace_kernels::{DeltaSpec, GateFunction, RopePairs};
use terrace_zero::ParamSpec;

/// How weights may be stored that are read in spite of a `quantization_config`.
const MXFP4: &str = "mxfp4";

/// Functions of the feed-forward's gate, as `hidden_act` spells them.
const GATE_FUNCTIONS: [(&str, GateFunction); 5] = [
    ("silu", GateFunction::Silu),
    ("swish", GateFunction::Silu),
    ("gelu", GateFunction::Gelu),
    ("gelu_new", GateFunction::GeluTanh),
    ("gelu_pytorch_tanh", GateFunction::GeluTanh),
];

/// The entries that cap scores of attention and logits.
const SCORE_CAP: &str = "attn_logit_softcapping";
const LOGIT_CAP: &str = "final_logit_softcapping";

/// Far more than the heads of any model make; a broken number must not become an allocation.
const CHANNELS_MAX: usize = 1 << 40;

/// Far more layers than any model has; a broken number must not become an allocation.
const LAYERS_MAX: usize = 1 << 16;

/// Where a decoder layer has norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and feed-forward.
    Before,
    /// Behind them, before what they give is added to the residual.
    After,
    /// At both places.
    Both,
}

/// Numbers by which a model multiplies what it computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Multipliers {
    /// Embeddings of tokens.
    pub embedding: f32,
    /// That number is rounded to the type of activations first.
    pub embedding_is_rounded: bool,
    /// What attention and feed-forward add to the residual, where no norm follows them.
    pub residual: f32,
    /// Scores of attention; `K^-½` if `None`.
    pub attention: Option<f32>,
    /// Logits.
    pub logits: f32,
}

impl Multipliers {
    /// None.
    pub const NONE: Self =
        Self { embedding: 1.0, embedding_is_rounded: false, residual: 1.0, attention: None, logits: 1.0 };

    fn parse(
        entries: &Entries<'_>,
        family: Family,
        hidden: usize,
        latent: Option<&LatentAttention>,
    ) -> Result<Self> {
        if let Some(latent) = latent {
            return Ok(Self { attention: Some(latent.scale(entries)?), ..Self::NONE });
        }
        let positive = |key: &str, default: f64| entries.positive_or(key, default);
        let of_gemma = Self { embedding: (hidden as f32).sqrt(), embedding_is_rounded: true, ..Self::NONE };
        Ok(match family {
            Family::Gemma => of_gemma,
            Family::Gemma2 | Family::Gemma3 => {
                let width = positive("query_pre_attn_scalar", 256.0)?;
                Self { attention: Some(width.sqrt().recip() as f32), ..of_gemma }
            }
            Family::Gemma4 => Self { attention: Some(1.0), ..of_gemma },
            Family::Cohere | Family::Cohere2 => {
                Self { logits: positive("logit_scale", 0.0625)? as f32, ..Self::NONE }
            }
            Family::Granite => Self {
                embedding: positive("embedding_multiplier", 1.0)? as f32,
                residual: positive("residual_multiplier", 1.0)? as f32,
                attention: Some(positive("attention_multiplier", 1.0)? as f32),
                logits: positive("logits_scaling", 1.0)?.recip() as f32,
                ..Self::NONE
            },
            _ => Self::NONE,
        })
    }
}

/// How the queries and the keys are normalized, before they are rotated unless it is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by itself, `K` weights.
    PerHead,
    /// The same when they have been rotated.
    PerRotatedHead,
    /// The same without weights, in layers that rotate them alone.
    PerRotatedHeadWithoutWeights,
    /// All heads of a token together, `H·K` and `G·K` weights.
    AllHeads,
}

impl QkNorm {
    fn parse(entries: &Entries<'_>, family: Family) -> Result<Option<Self>> {
        Ok(match family {
            Family::Qwen3 | Family::Gemma3 | Family::Gemma4 | Family::Qwen3Moe => Some(Self::PerHead),
            Family::Olmo2 | Family::Olmo3 | Family::Olmoe | Family::MiniMaxM2 => Some(Self::AllHeads),
            Family::Qwen3Next | Family::Qwen35 | Family::Qwen35Moe | Family::Exaone4 => Some(Self::PerHead),
            Family::HunYuan | Family::HunYuanMoe => Some(Self::PerRotatedHead),
            Family::Glm4Moe if entries.flag("use_qk_norm", false)? => Some(Self::PerHead),
            Family::Llama4 if entries.flag("use_qk_norm", true)? => Some(Self::PerRotatedHeadWithoutWeights),
            _ => None,
        })
    }
}

/// Layers with the gated delta rule in the place of attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaNet {
    /// Which they are.
    pub layers: Vec<usize>,
    /// Their heads.
    pub spec: DeltaSpec,
    /// Positions that the convolution in front of the rule sees, W.
    pub taps: usize,
}

/// What the blocks of a decoder-only model depend on.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The line of models.
    pub family: Family,
    /// It is the language model of a folder that holds more, whose tensors are named accordingly.
    pub is_part: bool,
    /// Vocabulary size, V.
    pub vocab: usize,
    /// Hidden size, D.
    pub hidden: usize,
    /// Feed-forward size, F, of layers without experts.
    pub feed_forward: usize,
    /// What the feed-forwards of layers with experts are.
    pub mixture: Option<Mixture>,
    /// Number of decoder layers.
    pub layers: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Key/value heads, G.
    pub kv_heads: usize,
    /// Head size, K.
    pub head_size: usize,
    /// Heads of layers without a window, if they are others.
    pub full_heads: Option<KvHeads>,
    /// Added to the mean square in every normalization.
    pub norm_eps: f32,
    /// The output projection is the embedding table.
    pub tied: bool,
    /// The query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub output_bias: bool,
    /// The feed-forward projections have biases.
    pub mlp_bias: bool,
    /// What is done to the feed-forward's gate.
    pub gate_function: GateFunction,
    /// Whether and how queries and keys are normalized.
    pub qk_norm: Option<QkNorm>,
    /// Values are normalized too, each head by itself, without weights.
    pub value_norm: bool,
    /// Layers without a window have no projection of values: they take that of keys, before its norm.
    pub keys_are_values: bool,
    /// Each query head has an attention sink.
    pub has_sinks: bool,
    /// What attention gives is multiplied by `σ` of a projection of its own.
    pub gated_attention: bool,
    /// Layers that have something else in the place of attention.
    pub delta: Option<DeltaNet>,
    /// Keys and values are made of a latent.
    pub latent: Option<LatentAttention>,
    /// Where layers have norms.
    pub norms: Norms,
    /// Norms multiply by one more than their weights.
    pub norm_plus_one: bool,
    /// Norms take the mean from what they normalize, as those of Ba et al., arXiv 1607.06450, do.
    pub norm_centers: bool,
    /// Attention and feed-forward read the same norm of what a layer is given, to which both are added.
    pub is_beside: bool,
    /// Sliding window of each layer; `None` sees everything before it.
    pub windows: Vec<Option<usize>>,
    /// Chunks of positions of each layer without a window: a position sees those before it in its own chunk; `None` sees all.
    pub chunks: Vec<Option<usize>>,
    /// Layers that do not rotate their queries and keys by their positions.
    pub unrotated: Vec<usize>,
    /// Numbers by which it multiplies what it computes.
    pub multipliers: Multipliers,
    /// What each layer gives is multiplied by a number of the model's files: [`constants`](Self::constants).
    pub has_layer_scales: bool,
    /// Scores of attention x are `cap·tanh(x/cap)`, before what a token does not see is hidden.
    pub score_cap: Option<f32>,
    /// Logits x are `cap·tanh(x/cap)` in the end.
    pub logit_cap: Option<f32>,
    /// Rotary position embedding.
    pub rope: Rope,
    /// That of layers with a window, if it is another; one that does not change with the length of sequences.
    pub window_rope: Option<Rope>,
    /// How the elements of a head that are rotated are paired, of attention without a latent.
    pub rope_pairs: RopePairs,
    /// What multiplies queries by their positions.
    pub query_factor: Option<QueryFactor>,
    /// Positions the model was trained for, or those that the scaling of its rotary embedding stretches them to: the largest that
    /// `max_position_embeddings`, other names for it and the scaling say.
    pub positions_max: usize,
    /// Entries of config.json by which training would compute something that is not computed here, and what they are: dropout, noise in
    /// what routers read, a loss that balances experts.
    pub only_in_training: Vec<(&'static str, f64)>,
    /// Standard deviation of freshly initialized weights.
    pub initializer_std: f32,
    /// Tokens that end a generation.
    pub eos_ids: Vec<u32>,
    /// The token of padding, whose embedding gets no gradient by being looked up, as with `padding_idx` of `torch.nn.Embedding`.
    pub pad_id: Option<usize>,
    /// How weights of the model's files lie that are FP8.
    pub fp8: Option<Fp8>,
}

/// Weights as FP8 with scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fp8 {
    /// Rows and columns that have a scale; all of a weight, if `None`.
    pub block: Option<[usize; 2]>,
}

impl DeltaNet {
    fn parse(entries: &Entries<'_>, layers: usize) -> Result<Self> {
        let spec = DeltaSpec {
            key_heads: entries.size_or("linear_num_key_heads", 16)?,
            value_heads: entries.size_or("linear_num_value_heads", 32)?,
            key_size: entries.size_or("linear_key_head_dim", 128)?,
            value_size: entries.size_or("linear_value_head_dim", 128)?,
        };
        let taps = entries.size_or("linear_conv_kernel_dim", 4)?;
        let Some(kinds) = entries.strings("layer_types")? else {
            let interval = entries.size_or("full_attention_interval", 4)?;
            let layers = (0..layers).filter(|layer| !(layer + 1).is_multiple_of(interval)).collect();
            return Ok(Self { layers, spec, taps });
        };
        if kinds.len() != layers {
            return Err(
                entries.error("layer_types", format!("has {} entries for {layers} layers", kinds.len()))
            );
        }
        let mut listed = Vec::new();
        for (layer, kind) in kinds.into_iter().enumerate() {
            match kind {
                "linear_attention" => listed.push(layer),
                "full_attention" => {}
                other => {
                    return Err(ModelError::Unsupported {
                        what: "layer_types entry".into(),
                        found: format!("\"{other}\""),
                        supported: "\"full_attention\", \"linear_attention\"".into(),
                    });
                }
            }
        }
        Ok(Self { layers: listed, spec, taps })
    }

    fn check(&self) -> Result {
        let refuse = |key: &str, detail: String| Err(ModelError::Config { key: key.into(), detail });
        let DeltaSpec { key_heads, value_heads, key_size, value_size } = self.spec;
        if !value_heads.is_multiple_of(key_heads) {
            let detail =
                format!("is {value_heads}, which is no multiple of linear_num_key_heads = {key_heads}");
            return refuse("linear_num_value_heads", detail);
        }
        if key_size > DeltaSpec::KEY_SIZE_MAX {
            let most = DeltaSpec::KEY_SIZE_MAX;
            return refuse(
                "linear_key_head_dim",
                format!("is {key_size}; keys of more than {most} are not computed"),
            );
        }
        if self.taps > DeltaSpec::TAPS_MAX {
            let most = DeltaSpec::TAPS_MAX;
            return refuse(
                "linear_conv_kernel_dim",
                format!("is {}; more than {most} are not computed", self.taps),
            );
        }
        let sizes = [key_heads, value_heads, key_size, value_size];
        let channels = sizes.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        if channels.is_none_or(|product| product > CHANNELS_MAX) {
            return refuse("linear_num_value_heads", "and the other numbers of heads are too large".into());
        }
        Ok(())
    }
}

impl ModelConfig {
    /// Reads `config.json` of a model folder.
    ///
    /// # Errors
    /// The file cannot be read or [`parse`](Self::parse) refuses it.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let text = std::fs::read_to_string(&path).map_err(ModelError::file("reading", &path))?;
        Self::read(&text).map_err(ModelError::config_file(&path))
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// Not JSON, an unsupported architecture or option, or numbers that do not fit together.
    pub fn parse(text: &str) -> Result<Self> {
        Self::read(text).map_err(ModelError::config_file(Path::new("config.json")))
    }

    fn read(text: &str) -> Result<Self> {
        let not_json = |e| ModelError::NoObject { detail: format!("is not JSON: {e}") };
        let whole = parse_json(text).map_err(not_json)?;
        let part = language_model(&whole)?;
        let is_nested = part.is_some() && whole.get(TEXT).is_some_and(Value::is_object);
        let entries = Entries::new(part.as_ref().unwrap_or(&whole))?.under(if is_nested { TEXT } else { "" });
        let family = family(&entries)?;
        refuse_unsupported(&entries, family)?;

        let hidden = entries.size("hidden_size")?;
        let heads = entries.size("num_attention_heads")?;
        let layers = entries.size("num_hidden_layers")?;
        if layers > LAYERS_MAX {
            let detail = format!("is {layers}; more than {LAYERS_MAX} layers are not supported");
            return Err(entries.error("num_hidden_layers", detail));
        }
        let defaults = family.defaults();
        let latent = LatentAttention::parse(&entries, family)?;
        let positions_max = entries.size_or("max_position_embeddings", defaults.positions)?;
        let vocab = entries.size("vocab_size")?;
        let biases = family.biases(&entries)?;
        let Sights { mut windows, chunks, unrotated } = Sights::parse(&entries, family, layers)?;
        let keys_are_values = family == Family::Gemma4 && entries.flag("attention_k_eq_v", false)?;
        let of_all = kv_heads(&entries, family, hidden, heads, latent.as_ref())?;
        let mut heads_by_kind = (of_all, None);
        if family == Family::Gemma4 {
            // Its class makes the last layer one that sees everything, whatever is said of it.
            windows.last_mut().into_iter().for_each(|window| *window = None);
            heads_by_kind = KvHeads::by_kind(&entries, &windows, keys_are_values, heads_by_kind.0)?;
        }
        let (KvHeads { count: kv_heads, size: head_size }, full_heads) = heads_by_kind;
        let (rope, window_rope) = match family {
            Family::Gemma4 => {
                let full_size = full_heads.map_or(head_size, |heads| heads.size);
                Rope::parse_by_kind(&entries, family, [full_size, head_size], positions_max)?
            }
            _ => {
                let size = latent.map_or(head_size, |latent| latent.rotated);
                Rope::parse(&entries, family, size, positions_max, defaults.theta)?
            }
        };
        let mixture = Mixture::parse(&entries, family, layers)?;
        let config = Self {
            family,
            is_part: part.is_some(),
            vocab,
            hidden,
            feed_forward: match family {
                // All of its layers have experts.
                Family::Qwen35Moe => entries.size_or("intermediate_size", 1)?,
                // What goes by the usual name is that of experts.
                Family::Llama4 => entries.size_or("intermediate_size_mlp", 16_384)?,
                _ => entries.size("intermediate_size")?,
            },
            only_in_training: only_in_training(&entries, family, defaults.dropout, mixture.is_some())?,
            mixture,
            layers,
            heads,
            kv_heads,
            head_size,
            full_heads,
            norm_eps: entries.number_or(family.norm_eps(), defaults.norm_eps)? as f32,
            tied: entries.flag("tie_word_embeddings", defaults.tied)?,
            qkv_bias: biases.qkv,
            output_bias: biases.output,
            mlp_bias: biases.mlp,
            gate_function: gate_function(&entries, family)?,
            qk_norm: QkNorm::parse(&entries, family)?,
            value_norm: family == Family::Gemma4,
            keys_are_values,
            has_sinks: family == Family::GptOss,
            gated_attention: family.has_delta(),
            delta: if family.has_delta() { Some(DeltaNet::parse(&entries, layers)?) } else { None },
            norms: family.norms(),
            norm_plus_one: family.norm_plus_one(),
            norm_centers: family.is_cohere(),
            is_beside: family.is_cohere(),
            multipliers: Multipliers::parse(&entries, family, hidden, latent.as_ref())?,
            latent,
            has_layer_scales: family == Family::Gemma4,
            score_cap: cap(&entries, family, SCORE_CAP)?,
            logit_cap: cap(&entries, family, LOGIT_CAP)?,
            windows,
            chunks,
            unrotated,
            positions_max: rope.positions(family, positions_max, other_positions(&entries)?),
            rope,
            window_rope,
            rope_pairs: family.rotated_pairs(),
            query_factor: QueryFactor::parse(&entries, family)?,
            initializer_std: entries.number_or("initializer_range", 0.02)? as f32,
            eos_ids: eos_ids(&entries, family)?,
            pad_id: pad_id(&entries, vocab, defaults.pad)?,
            fp8: fp8(&entries)?,
        };
        config.check()?;
        Ok(config)
    }

    /// What a layer has in the place of attention; `None` if it has attention.
    pub fn delta_of(&self, layer: usize) -> Option<&DeltaNet> {
        self.delta.as_ref().filter(|delta| delta.layers.contains(&layer))
    }

    /// The experts of a layer; `None` if it has one feed-forward for all tokens.
    pub fn mixture_of(&self, layer: usize) -> Option<&Mixture> {
        self.mixture.as_ref().filter(|mixture| !mixture.dense_layers.contains(&layer))
    }

    /// Heads of a layer that has attention.
    pub fn heads_of(&self, layer: usize) -> KvHeads {
        let usual = KvHeads { count: self.kv_heads, size: self.head_size };
        self.full_heads.filter(|_| self.windows[layer].is_none()).unwrap_or(usual)
    }

    /// Whether a layer that has attention has a projection of values.
    pub fn projects_values(&self, layer: usize) -> bool {
        !self.keys_are_values || self.windows[layer].is_some()
    }

    /// Tensors of the model's files that are neither trained nor moved, all of one size, f32, of each layer that has any: numbers that are
    /// added to scores of experts, `[E]`, or one that multiplies what the layer gives, `[1]`. A [batch](crate::TokenBatch::for_model) brings
    /// them, and exports copy them.
    pub fn constants(&self) -> Vec<ParamSpec> {
        if self.has_layer_scales {
            let name = |layer: usize| format!("model.layers.{layer}.layer_scalar");
            return (0..self.layers).map(|layer| ParamSpec::new(name(layer), &[1])).collect();
        }
        let names = self.family.expert_names();
        let of_layer = |layer: usize| {
            let mixture = self.mixture_of(layer).filter(|mixture| mixture.has_score_biases)?;
            let name = format!("model.layers.{layer}.{}.e_score_correction_bias", names.score_biases);
            match self.family {
                Family::Ernie45Moe => Some(ParamSpec::new(name, &[1, mixture.experts])),
                _ => Some(ParamSpec::new(name, &[mixture.experts])),
            }
        };
        (0..self.layers).filter_map(of_layer).collect()
    }

    /// Width of all query heads of a layer together, H·K.
    pub fn query_width(&self, layer: usize) -> usize {
        self.heads * self.heads_of(layer).size
    }

    /// Width of all key (or value) heads of a layer together, G·K.
    pub fn kv_width(&self, layer: usize) -> usize {
        let KvHeads { count, size } = self.heads_of(layer);
        count * size
    }

    /// What a hand-made configuration must fulfil too.
    ///
    /// # Errors
    /// Numbers that do not fit together.
    pub fn check(&self) -> Result {
        let refuse = |key: &str, detail: String| Err(ModelError::Config { key: key.into(), detail });
        self.latent.iter().try_for_each(|latent| latent.check(self))?;
        heads::check(self)?;
        for (key, cap) in [(SCORE_CAP, self.score_cap), (LOGIT_CAP, self.logit_cap)] {
            if cap.is_some_and(|cap| !(cap.is_normal() && cap > 0.0)) {
                return refuse(key, "must be positive, and neither tiny nor huge".into());
            }
        }
        if self.score_cap.is_some() && self.latent.is_some() {
            return refuse(SCORE_CAP, "is computed in attention without a latent alone".into());
        }
        let is_more = self.mixture.is_some() || self.latent.is_some() || self.delta.is_some();
        let is_plain = self.norms == Norms::Before && self.multipliers.residual == 1.0;
        if self.is_beside && (is_more || !is_plain || self.has_layer_scales) {
            let detail = "of attention and feed-forward side by side is computed without experts, latents and norms behind them alone";
            return refuse("architectures", detail.into());
        }
        if self.query_factor.is_some() && (self.latent.is_some() || self.delta.is_some()) {
            return refuse("llama_4_scaling_beta", "is computed in attention without a latent alone".into());
        }
        if self.has_layer_scales && self.mixture.iter().any(|mixture| mixture.has_score_biases) {
            return refuse("layer_scalar", "and biases of scores are not computed together".into());
        }
        if let RopeScaling::Long { short, long, .. } = &self.rope.scaling
            && [short, long].iter().any(|divisors| divisors.len() < self.rope.size / 2)
        {
            let detail = format!("and long_factor have fewer than {} numbers", self.rope.size / 2);
            return refuse("short_factor", detail);
        }
        if self.vocab > i32::MAX as usize {
            return refuse("vocab_size", format!("is {}; token ids are 32-bit", self.vocab));
        }
        let Multipliers { embedding, residual, attention, logits, .. } = self.multipliers;
        let multipliers = [
            ("embedding_multiplier", embedding),
            ("residual_multiplier", residual),
            ("attention_multiplier", attention.unwrap_or(1.0)),
            (self.family.logits_key(), logits.recip()),
        ];
        if let Some((key, factor)) =
            multipliers.into_iter().find(|(_, factor)| !(factor.is_normal() && *factor > 0.0))
        {
            return refuse(key, format!("is {factor}; it must be positive, and neither tiny nor huge"));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0) {
            return refuse(self.family.norm_eps(), format!("is {}; it must be positive", self.norm_eps));
        }
        self.delta.iter().try_for_each(DeltaNet::check)?;
        self.mixture.iter().try_for_each(|mixture| mixture.check(self.layers))?;
        if self.windows.len() != self.layers {
            let detail = format!("has {} entries for {} layers", self.windows.len(), self.layers);
            return refuse("layer_types", detail);
        }
        self.check_chunks()
    }

    fn check_chunks(&self) -> Result {
        let refuse = |detail: String| Err(ModelError::Config { key: "attention_chunk_size".into(), detail });
        if self.chunks.len() != self.layers {
            return refuse(format!("is of {} layers, and there are {}", self.chunks.len(), self.layers));
        }
        let both = |layer: &usize| self.windows[*layer].is_some() && self.chunks[*layer].is_some();
        match (0..self.layers).find(both) {
            Some(layer) => {
                refuse(format!("is of layer {layer}, too, which has a window: it can have one of the two"))
            }
            None => Ok(()),
        }
    }
}

/// Heads of keys and values, as the configuration says it of all layers.
fn kv_heads(
    entries: &Entries<'_>,
    family: Family,
    hidden: usize,
    heads: usize,
    latent: Option<&LatentAttention>,
) -> Result<KvHeads> {
    let defaults = family.defaults();
    let count = match entries.optional_size("num_key_value_heads")? {
        Some(count) => count,
        None if entries.has("num_key_value_heads") => heads,
        None => defaults.kv_heads.unwrap_or(heads),
    };
    let size = match (entries.optional_size("head_dim")?, family) {
        // What transformers calls so is the part that is rotated.
        _ if latent.is_some() => latent.map_or(0, LatentAttention::head_size),
        (Some(size), _) => size,
        (None, Family::SeedOss | Family::Ernie45 | Family::Llama4) if entries.has("head_dim") => {
            divided(hidden, heads)?
        }
        (None, _) => defaults.head_size.map_or_else(|| divided(hidden, heads), Ok)?,
    };
    Ok(KvHeads { count, size })
}

/// Of some families null means the default, too.
fn eos_ids(entries: &Entries<'_>, family: Family) -> Result<Vec<u32>> {
    let is_said = match family {
        Family::Glm | Family::Glm4 => entries.has_value("eos_token_id"),
        _ => entries.has("eos_token_id"),
    };
    if is_said { entries.ids("eos_token_id") } else { Ok(family.defaults().eos.to_vec()) }
}

/// What is said about positions under names that only some folders use.
fn other_positions(entries: &Entries<'_>) -> Result<Option<usize>> {
    let found = ["max_sequence_length", "n_positions"].map(|key| entries.optional_size(key));
    Ok(found.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().max())
}

/// Negative ids count from the end, as those of `padding_idx` do.
fn pad_id(entries: &Entries<'_>, vocab: usize, default: Option<usize>) -> Result<Option<usize>> {
    if !entries.has("pad_token_id") {
        // A class that has one cannot be built with fewer tokens.
        return Ok(default.filter(|id| *id < vocab));
    }
    let Some(id) = entries.number("pad_token_id")? else { return Ok(None) };
    let from_start = if id < 0.0 { id + vocab as f64 } else { id };
    if from_start.fract() != 0.0 || !(0.0..vocab as f64).contains(&from_start) {
        let detail = format!("is {id}; it must be a token id below vocab_size = {vocab}");
        return Err(entries.error("pad_token_id", detail));
    }
    Ok(Some(from_start as usize))
}

fn gate_function(entries: &Entries<'_>, family: Family) -> Result<GateFunction> {
    if family == Family::GptOss {
        return clamped_swish(entries);
    }
    let of_later_gemma = family.is_gemma() && family != Family::Gemma;
    let key = if of_later_gemma { "hidden_activation" } else { "hidden_act" };
    let default = if family.is_gemma() { "gelu_pytorch_tanh" } else { "silu" };
    let name = match (entries.string(key)?.unwrap_or(default), family) {
        // What its first folders say, and do not mean.
        ("gelu", Family::Gemma) => default,
        (name, _) => name,
    };
    let found = GATE_FUNCTIONS.iter().find(|(known, _)| *known == name);
    found.map(|(_, function)| *function).ok_or_else(|| ModelError::Unsupported {
        what: key.into(),
        found: format!("\"{name}\""),
        supported: GATE_FUNCTIONS.map(|(known, _)| format!("\"{known}\"")).join(", "),
    })
}

/// What a family's class caps by where its configuration does not say, if it caps at all: no number, if nothing is capped then.
fn usual_cap(family: Family, key: &str) -> Option<Option<f32>> {
    match (family, key) {
        (Family::Gemma2, SCORE_CAP) => Some(Some(50.0)),
        (Family::Gemma2, LOGIT_CAP) => Some(Some(30.0)),
        (Family::Gemma4, LOGIT_CAP) => Some(None),
        _ => None,
    }
}

fn cap(entries: &Entries<'_>, family: Family, key: &str) -> Result<Option<f32>> {
    match usual_cap(family, key) {
        Some(_) if entries.has_value(key) => Ok(Some(entries.positive(key)? as f32)),
        Some(usual) if !entries.has(key) => Ok(usual),
        _ => Ok(None),
    }
}

/// That of gpt-oss, whatever its configuration calls it.
fn clamped_swish(entries: &Entries<'_>) -> Result<GateFunction> {
    let (slope, limit) = (GateFunction::SWISH_SLOPE, GateFunction::SWISH_LIMIT);
    for (key, computed) in [("swiglu_alpha", slope), ("swiglu_limit", limit)] {
        let found = entries.number_or(key, computed)?;
        if found != computed {
            return Err(ModelError::Unsupported {
                what: key.into(),
                found: found.to_string(),
                supported: computed.to_string(),
            });
        }
    }
    Ok(GateFunction::ClampedSwish)
}

fn refuse_unsupported(entries: &Entries<'_>, family: Family) -> Result {
    let method = entries.string_at("quantization_config", "quant_method");
    let is_read = method == Some(if family == Family::GptOss { MXFP4 } else { fp8::METHOD });
    if entries.has_value("quantization_config") && !is_read {
        return Err(ModelError::Unsupported {
            what: "quantization_config".into(),
            found: method.unwrap_or("(unnamed)").into(),
            supported: "unquantized f32, bf16 or f16 weights, or \"fp8\" (convert the checkpoint first)"
                .into(),
        });
    }
    for key in [SCORE_CAP, LOGIT_CAP] {
        if let Some(cap) = entries.number(key)?.filter(|_| usual_cap(family, key).is_none()) {
            return Err(ModelError::Unsupported {
                what: key.into(),
                found: cap.to_string(),
                supported: "null (logits and scores are not capped)".into(),
            });
        }
    }
    for (key, families) in [
        ("mlp_bias", &[Family::DeepseekV2][..]),
        ("use_bias", &[Family::Ernie45, Family::Ernie45Moe]),
        ("use_qk_norm", &[Family::Cohere]),
    ] {
        if families.contains(&family) && entries.flag(key, false)? {
            return Err(ModelError::Unsupported {
                what: key.into(),
                found: "true".into(),
                supported: format!("false (in {})", family.architecture()),
            });
        }
    }
    if let Some(most) = entries.number("clip_qkv")? {
        return Err(ModelError::Unsupported {
            what: "clip_qkv".into(),
            found: most.to_string(),
            supported: "null (queries, keys and values are not limited)".into(),
        });
    }
    if family == Family::Gemma4 {
        refuse_of_gemma4(entries)?;
    }
    for (key, causal) in [("use_bidirectional_attention", false), ("is_causal", true)] {
        if family == Family::Gemma4 && !causal {
            continue;
        }
        let found = entries.flag(key, causal)?;
        if found != causal {
            return Err(ModelError::Unsupported {
                what: key.into(),
                found: found.to_string(),
                supported: format!("{causal} (a token sees those before it)"),
            });
        }
    }
    Ok(())
}

fn fp8(entries: &Entries<'_>) -> Result<Option<Fp8>> {
    let quantization = entries.object("quantization_config")?;
    let is_fp8 = |quantization: &Entries<'_>| {
        quantization.string("quant_method").map(|method| method == Some(fp8::METHOD))
    };
    match quantization {
        Some(quantization) if is_fp8(&quantization)? => Ok(Some(Fp8 { block: fp8::block(&quantization)? })),
        _ => Ok(None),
    }
}

/// The entries of what only training computes.
fn only_in_training(
    entries: &Entries<'_>,
    family: Family,
    default: f64,
    has_experts: bool,
) -> Result<Vec<(&'static str, f64)>> {
    let part = |key: &&'static str| entries.number_or(key, default).map(|part| (*key, part));
    let mut all = family.dropouts().iter().map(part).collect::<Result<Vec<_>>>()?;
    // The class of Llama 4 gives them and adds no loss.
    if has_experts && family != Family::Llama4 && entries.flag("output_router_logits", false)? {
        let default = if family == Family::Olmoe { 0.01 } else { 0.001 };
        all.push(("router_aux_loss_coef", entries.number_or("router_aux_loss_coef", default)?));
    }
    Ok(all.into_iter().filter(|(_, part)| *part != 0.0).collect())
}

fn divided(hidden: usize, heads: usize) -> Result<usize> {
    if hidden.is_multiple_of(heads) {
        return Ok(hidden / heads);
    }
    Err(ModelError::Config {
        key: "hidden_size".into(),
        detail: format!(
            "is {hidden}, not a multiple of num_attention_heads = {heads}, and head_dim is not given"
        ),
    })
}
