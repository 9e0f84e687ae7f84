//! Feed-forwards with experts, as `config.json` describes them.

use crate::entries::Entries;
use crate::family::Family;
use crate::{ModelError, Result};
use std::ops::Range;
use terrace_kernels::{ExpertGroups, GroupScore, Scores};

/// Experts, of which each token goes through a few.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// Experts of a layer, E.
    pub experts: usize,
    /// How many of them a token goes through, X.
    pub chosen: usize,
    /// Feed-forward size of each.
    pub feed_forward: usize,
    /// What makes scores, which are compared and weigh, of a router's logits.
    pub scores: Scores,
    /// Experts are chosen from some groups of them alone.
    pub groups: Option<ExpertGroups>,
    /// The model's files have numbers that are added to scores where these are compared: [`constants`](crate::ModelConfig::constants).
    pub has_score_biases: bool,
    /// The weights of those that a token goes through are divided by their sum.
    pub normalize: bool,
    /// What they are multiplied by in the end.
    pub scale: f32,
    /// They multiply what an expert is given, not what it gives.
    pub weighs_inputs: bool,
    /// The router and the experts have biases.
    pub biased: bool,
    /// What all tokens go through beside their experts.
    pub shared: Option<SharedExpert>,
    /// All tokens go through the feed-forward of the other layers too, as in Gemma 4: what it gives and what experts give is normalized by
    /// itself, and the router has a norm of its own and a number for each expert.
    pub is_beside_dense: bool,
    /// Layers that have one feed-forward for all tokens instead.
    pub dense_layers: Vec<usize>,
    /// Of how many experts the gradients are there at once, at most, in training with one micro-batch a step; `None` for those that have
    /// 5 · 2^27 numbers, 2.5 GiB. It changes the order of parameters of a layer, and of sums of gradients.
    pub experts_at_once: Option<usize>,
}

/// Numbers of experts whose gradients are there at once: all of a layer of Qwen 3 30B, which in three stages took 1.04 to 1.08 times as long on
/// a CPU, for 1.3 GiB less.
const AT_ONCE: usize = 5 << 27;

/// A feed-forward beside the experts of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its size.
    pub feed_forward: usize,
    /// What it gives is multiplied by a number between 0 and 1 that each token has.
    pub is_gated: bool,
}

/// What parameters of experts are called within a layer.
pub(crate) struct ExpertNames {
    /// The norm of what they read.
    pub(crate) norm: &'static str,
    pub(crate) experts: &'static str,
    pub(crate) router: &'static str,
    pub(crate) score_biases: &'static str,
    pub(crate) shared: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

impl Mixture {
    /// The experts of a layer whose gradients are there at once, where rows have `hidden` numbers: about as many each time.
    pub fn stages(&self, hidden: usize) -> Vec<Range<usize>> {
        let each = 3usize.saturating_mul(hidden).saturating_mul(self.feed_forward).max(1);
        let most = self.experts_at_once.unwrap_or(AT_ONCE / each).clamp(1, self.experts.max(1));
        // What is beside another feed-forward has its backward in several pieces, between which sums go on.
        if self.is_beside_dense || most >= self.experts {
            return std::iter::once(0..self.experts).collect();
        }
        let stages = self.experts.div_ceil(most);
        let (each, more) = (self.experts / stages, self.experts % stages);
        // Larger ones first: memory of the one before has room for the next.
        let start = |stage: usize| stage * each + stage.min(more);
        (0..stages).map(|stage| start(stage)..start(stage + 1)).collect()
    }

    /// `None` if the family has no experts.
    pub(crate) fn parse(entries: &Entries<'_>, family: Family, layers: usize) -> Result<Option<Self>> {
        // Newer folders may use the other name.
        let experts = |keys, default| size_of_either(entries, keys, default);
        let chosen = |default: usize| entries.size_or("num_experts_per_tok", default);
        let normalize = || entries.flag("norm_topk_prob", false);
        let of_num_experts = ["num_experts", "num_local_experts"];
        let of_num_local_experts = ["num_local_experts", "num_experts"];
        let inner = || entries.size("intermediate_size");
        let inner_of_experts = |default: usize| entries.size_or("moe_intermediate_size", default);
        Ok(match family {
            Family::Mixtral => Some(Self::usual(experts(of_num_local_experts, 8)?, chosen(2)?, inner()?)),
            Family::Llama4 => Some(Self {
                scores: Scores::Sigmoid,
                normalize: false,
                weighs_inputs: true,
                shared: Some(SharedExpert { feed_forward: inner()?, is_gated: false }),
                dense_layers: all_but_every(entries, layers)?,
                ..Self::usual(experts(of_num_local_experts, 16)?, chosen(1)?, inner()?)
            }),
            Family::Olmoe => Some(Self {
                normalize: normalize()?,
                ..Self::usual(experts(of_num_experts, 64)?, chosen(8)?, inner()?)
            }),
            Family::Qwen3Moe => Some(Self {
                normalize: normalize()?,
                dense_layers: dense_layers(entries, layers)?,
                ..Self::usual(experts(of_num_experts, 128)?, chosen(8)?, inner_of_experts(768)?)
            }),
            Family::Qwen2Moe => Some(Self {
                normalize: normalize()?,
                shared: Some(SharedExpert {
                    feed_forward: entries.size_or("shared_expert_intermediate_size", 5632)?,
                    is_gated: true,
                }),
                dense_layers: dense_layers(entries, layers)?,
                ..Self::usual(experts(of_num_experts, 60)?, chosen(4)?, inner_of_experts(1408)?)
            }),
            Family::Qwen3Next => Some(Self {
                normalize: entries.flag("norm_topk_prob", true)?,
                shared: Some(SharedExpert {
                    feed_forward: entries.size_or("shared_expert_intermediate_size", 512)?,
                    is_gated: true,
                }),
                dense_layers: dense_layers(entries, layers)?,
                ..Self::usual(experts(of_num_experts, 512)?, chosen(10)?, inner_of_experts(512)?)
            }),
            Family::Qwen35Moe => Some(Self {
                shared: Some(SharedExpert {
                    feed_forward: entries.size_or("shared_expert_intermediate_size", 512)?,
                    is_gated: true,
                }),
                ..Self::usual(experts(of_num_experts, 256)?, chosen(8)?, inner_of_experts(512)?)
            }),
            Family::Glm4Moe | Family::Glm4MoeLite | Family::DeepseekV2 | Family::DeepseekV3 => {
                Some(Self::of_deepseek(entries, family, layers)?)
            }
            Family::MiniMaxM2 => Some(Self {
                scores: Scores::Sigmoid,
                has_score_biases: true,
                ..Self::usual(experts(of_num_local_experts, 256)?, chosen(8)?, inner()?)
            }),
            Family::HunYuanMoe => Some(Self {
                shared: Some(SharedExpert { feed_forward: inner()?, is_gated: false }),
                ..Self::usual(experts(of_num_experts, 1)?, the_same_in_all(entries, "moe_topk", 1)?, inner()?)
            }),
            Family::Ernie45Moe => Some(Self::of_ernie(entries, layers)?),
            Family::Gemma4 if entries.flag("enable_moe_block", false)? => {
                let size = |key| entries.size(key);
                let (experts, chosen) = (size("num_experts")?, size("top_k_experts")?);
                Some(Self {
                    is_beside_dense: true,
                    ..Self::usual(experts, chosen, size("moe_intermediate_size")?)
                })
            }
            Family::GptOss => Some(Self {
                biased: true,
                ..Self::usual(experts(of_num_local_experts, 128)?, chosen(4)?, inner()?)
            }),
            _ => None,
        })
    }

    /// Each token's weights are divided by their sum, and nothing else is there.
    fn usual(experts: usize, chosen: usize, feed_forward: usize) -> Self {
        Self {
            experts,
            chosen,
            feed_forward,
            scores: Scores::Softmax,
            groups: None,
            has_score_biases: false,
            normalize: true,
            scale: 1.0,
            weighs_inputs: false,
            biased: false,
            shared: None,
            is_beside_dense: false,
            dense_layers: Vec::new(),
            experts_at_once: None,
        }
    }

    fn of_ernie(entries: &Entries<'_>, layers: usize) -> Result<Self> {
        let feed_forward = entries.size_or("moe_intermediate_size", 1536)?;
        refuse_least_sum(entries)?;
        // What is saved goes by other names than those of transformers.
        let experts = size_of_either(entries, ["moe_num_experts", "num_experts"], 64)?;
        let chosen = size_of_either(entries, ["moe_k", "num_experts_per_tok"], 6)?;
        Ok(Self {
            has_score_biases: true,
            shared: of_several(entries, "moe_num_shared_experts", feed_forward, 2)?,
            dense_layers: layers_between(entries, layers)?,
            ..Self::usual(experts, chosen, feed_forward)
        })
    }

    /// As DeepSeek V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437) have them, and GLM 4.5 took them over.
    fn of_deepseek(entries: &Entries<'_>, family: Family, layers: usize) -> Result<Self> {
        // Experts, chosen, their size, those for all tokens, groups, of which chosen from, scale.
        let (experts, chosen, inner, shared, groups, kept, scale) = match family {
            Family::DeepseekV2 => (64, None, 1407, 2, 1, 1, 1.0),
            Family::DeepseekV3 => (256, Some(8), 2048, 1, 8, 4, 2.5),
            Family::Glm4MoeLite => (64, Some(4), 1536, 1, 1, 1, 1.8),
            _ => (128, Some(8), 1408, 1, 1, 1, 1.0),
        };
        let feed_forward = entries.size_or("moe_intermediate_size", inner)?;
        let shared = of_several(entries, "n_shared_experts", feed_forward, shared)?;
        let is_v2 = family == Family::DeepseekV2;
        let (count, kept) = (entries.size_or("n_group", groups)?, entries.size_or("topk_group", kept)?);
        let groups = match is_v2 {
            true if !chooses_groups(entries)? => None,
            true => Some(ExpertGroups { count, kept, by: GroupScore::Largest }),
            // A choice from all groups is one without groups.
            false if count == kept => None,
            false => Some(ExpertGroups { count, kept, by: GroupScore::TwoLargest }),
        };
        if is_v2 && entries.flag("norm_topk_prob", false)? {
            return Err(ModelError::Unsupported {
                what: "norm_topk_prob".into(),
                found: "true".into(),
                supported: "false (transformers does not read it in a DeepSeek V2)".into(),
            });
        }
        Ok(Self {
            experts: entries.size_or("n_routed_experts", experts)?,
            chosen: match chosen {
                Some(chosen) => entries.size_or("num_experts_per_tok", chosen)?,
                None => entries.size("num_experts_per_tok")?,
            },
            feed_forward,
            scores: if is_v2 { Scores::Softmax } else { Scores::Sigmoid },
            groups,
            has_score_biases: !is_v2,
            normalize: !is_v2 && entries.flag("norm_topk_prob", true)?,
            scale: entries.positive_or("routed_scaling_factor", scale)? as f32,
            weighs_inputs: false,
            biased: false,
            shared,
            is_beside_dense: false,
            dense_layers: first_dense_layers(entries, family, layers)?,
            experts_at_once: None,
        })
    }

    /// What a hand-made one must fulfil too.
    pub(crate) fn check(&self, layers: usize) -> Result {
        let refuse = |key: &str, detail: String| Err(ModelError::Config { key: key.into(), detail });
        let Self { experts, chosen, .. } = *self;
        if experts > EXPERTS_MAX {
            return refuse("num_experts", format!("is {experts}; more than {EXPERTS_MAX} are not supported"));
        }
        if experts * layers > ALL_EXPERTS_MAX {
            let detail = format!(
                "is {experts}, in {layers} layers; more than {ALL_EXPERTS_MAX} in all are not supported"
            );
            return refuse("num_experts", detail);
        }
        if chosen == 0 || chosen > experts {
            let detail = format!("is {chosen}, of {experts} experts; it must be at least 1 and at most that");
            return refuse("num_experts_per_tok", detail);
        }
        if self.weighs_inputs && self.biased {
            return refuse(
                "num_experts",
                "have biases, and weights that multiply their inputs: one of the two is computed".into(),
            );
        }
        if let Some(ExpertGroups { count, kept, by }) = self.groups {
            if count == 0 || !experts.is_multiple_of(count) {
                let detail = format!("is {count}, which does not divide {experts} experts");
                return refuse("n_group", detail);
            }
            if count > ExpertGroups::COUNT_MAX {
                let most = ExpertGroups::COUNT_MAX;
                return refuse("n_group", format!("is {count}; more than {most} groups are not computed"));
            }
            let size = experts / count;
            if by == GroupScore::TwoLargest && size < 2 {
                return refuse("n_group", format!("is {count}; of {experts} experts no group has two"));
            }
            if kept == 0 || kept > count {
                let detail = format!("is {kept}, of {count} groups; it must be at least 1 and at most that");
                return refuse("topk_group", detail);
            }
            if chosen > kept * size {
                let detail = format!("is {kept}, of {size} experts each, fewer than the {chosen} of a token");
                return refuse("topk_group", detail);
            }
        }
        Ok(())
    }
}

/// Far more than any model has; a broken number must not become an allocation.
const EXPERTS_MAX: usize = 1 << 12;
const ALL_EXPERTS_MAX: usize = 1 << 18;

/// What is under the first key, or else under the second.
fn size_of_either(entries: &Entries<'_>, keys: [&str; 2], default: usize) -> Result<usize> {
    let key = if entries.has_value(keys[0]) { keys[0] } else { keys[1] };
    entries.size_or(key, default)
}

/// A feed-forward for all tokens, as large as several experts, of which `key` says how many.
fn of_several(
    entries: &Entries<'_>,
    key: &str,
    feed_forward: usize,
    default: usize,
) -> Result<Option<SharedExpert>> {
    let count = entries.size_or_zero(key, default)?;
    let all = feed_forward.checked_mul(count).filter(|inner| u32::try_from(*inner).is_ok());
    let all = all
        .ok_or_else(|| entries.error(key, format!("is {count}, of {feed_forward} each; that is too many")))?;
    Ok((count > 0).then_some(SharedExpert { feed_forward: all, is_gated: false }))
}

/// A number, or a list of one for each layer, which have to be equal.
fn the_same_in_all(entries: &Entries<'_>, key: &str, default: usize) -> Result<usize> {
    let listed = match entries.is_array(key) {
        true => entries.numbers(key)?.unwrap_or_default(),
        false => return entries.size_or(key, default),
    };
    let first = listed.first().copied().unwrap_or_default();
    if listed.iter().any(|of_layer| *of_layer != first) {
        return Err(ModelError::Unsupported {
            what: key.into(),
            found: "a list of different numbers".into(),
            supported: "a number, or the same for each layer".into(),
        });
    }
    if first < 1.0 || first.fract() != 0.0 {
        return Err(entries.error(key, format!("holds {first}; it must be a positive integer")));
    }
    Ok(first as usize)
}

/// What ERNIE divides by at least. Scores that experts are chosen by are far larger.
fn refuse_least_sum(entries: &Entries<'_>) -> Result {
    let least = entries.number_or("moe_norm_min", 1e-12)?;
    if least <= 1e-9 {
        return Ok(());
    }
    Err(ModelError::Unsupported {
        what: "moe_norm_min".into(),
        found: least.to_string(),
        supported: "at most 1e-9 (weights of experts are divided by their sum)".into(),
    })
}

/// All but the last of every `moe_layer_interval` between the first and the last layer that may have experts.
fn layers_between(entries: &Entries<'_>, layers: usize) -> Result<Vec<usize>> {
    let interval = entries.size_or("moe_layer_interval", 1)?;
    let first = entries.size_or_zero("moe_layer_start_index", 1)?;
    let last = match entries.number("moe_layer_end_index")? {
        None | Some(-1.0) => layers,
        Some(_) => entries.size_or_zero("moe_layer_end_index", layers)?,
    };
    let is_dense = |layer: &usize| !(layer + 1).is_multiple_of(interval) || !(first..=last).contains(layer);
    Ok((0..layers).filter(is_dense).collect())
}

/// Those that a list names, and all but the last of every `decoder_sparse_step`.
fn dense_layers(entries: &Entries<'_>, layers: usize) -> Result<Vec<usize>> {
    let step = entries.size_or("decoder_sparse_step", 1)?;
    let listed = entries.numbers("mlp_only_layers")?.unwrap_or_default();
    let is_dense = |layer: &usize| !(layer + 1).is_multiple_of(step) || listed.contains(&(*layer as f64));
    Ok((0..layers).filter(is_dense).collect())
}

/// Those that a list of layers with experts does not name, or, without one, all but the last of every `interleave_moe_layer_step`.
fn all_but_every(entries: &Entries<'_>, layers: usize) -> Result<Vec<usize>> {
    let (listed, step) = (entries.numbers("moe_layers")?, entries.size_or("interleave_moe_layer_step", 1)?);
    let is_dense = |layer: &usize| match &listed {
        Some(listed) => !listed.contains(&(*layer as f64)),
        None => !(layer + 1).is_multiple_of(step),
    };
    Ok((0..layers).filter(is_dense).collect())
}

/// Layers before those with experts.
fn first_dense_layers(entries: &Entries<'_>, family: Family, layers: usize) -> Result<Vec<usize>> {
    let step = entries.size_or("moe_layer_freq", 1)?;
    if step != 1 {
        return Err(ModelError::Unsupported {
            what: "moe_layer_freq".into(),
            found: step.to_string(),
            supported: "1 (all layers behind the first have experts)".into(),
        });
    }
    let first = match family {
        Family::DeepseekV2 => 0,
        Family::DeepseekV3 => 3,
        _ => 1,
    };
    if family != Family::Glm4MoeLite {
        return Ok((0..entries.size_or_zero("first_k_dense_replace", first)?.min(layers)).collect());
    }
    let Some(kinds) = entries.strings("mlp_layer_types")? else { return Ok((0..first).collect()) };
    if kinds.len() != layers {
        return Err(
            entries.error("mlp_layer_types", format!("has {} entries for {layers} layers", kinds.len()))
        );
    }
    let is_dense = |(layer, kind): (usize, &&str)| match *kind {
        "dense" => Ok(Some(layer)),
        "sparse" => Ok(None),
        other => Err(ModelError::Unsupported {
            what: "mlp_layer_types entry".into(),
            found: format!("\"{other}\""),
            supported: "\"dense\", \"sparse\"".into(),
        }),
    };
    kinds.iter().enumerate().filter_map(|kind| is_dense(kind).transpose()).collect()
}

/// Whether a DeepSeek V2 chooses groups of experts first.
fn chooses_groups(entries: &Entries<'_>) -> Result<bool> {
    match entries.string("topk_method")? {
        None | Some("greedy") => Ok(false),
        Some("group_limited_greedy") => Ok(true),
        Some(other) => Err(ModelError::Unsupported {
            what: "topk_method".into(),
            found: format!("\"{other}\""),
            supported: "\"greedy\", \"group_limited_greedy\"".into(),
        }),
    }
}

impl Family {
    /// Of a family with experts.
    pub(crate) fn expert_names(self) -> ExpertNames {
        let usual = ExpertNames {
            norm: "post_attention_layernorm",
            experts: "mlp.experts",
            router: "mlp.gate",
            score_biases: "mlp.gate",
            shared: "mlp.shared_expert",
            gate: "gate_proj",
            up: "up_proj",
            down: "down_proj",
        };
        match self {
            Self::Mixtral | Self::MiniMaxM2 => ExpertNames {
                experts: "block_sparse_moe.experts",
                router: "block_sparse_moe.gate",
                score_biases: "block_sparse_moe",
                gate: "w1",
                up: "w3",
                down: "w2",
                ..usual
            },
            Self::Gemma4 => ExpertNames {
                norm: "pre_feedforward_layernorm_2",
                experts: "experts",
                router: "router.proj",
                shared: "mlp",
                ..usual
            },
            Self::Glm4Moe | Self::Glm4MoeLite | Self::DeepseekV2 | Self::DeepseekV3 => {
                ExpertNames { shared: "mlp.shared_experts", ..usual }
            }
            Self::HunYuanMoe => ExpertNames { router: "mlp.gate.wg", shared: "mlp.shared_mlp", ..usual },
            Self::Ernie45Moe => {
                ExpertNames { score_biases: "mlp.moe_statics", shared: "mlp.shared_experts", ..usual }
            }
            Self::GptOss => ExpertNames { router: "mlp.router", ..usual },
            Self::Llama4 => ExpertNames {
                experts: "feed_forward.experts",
                router: "feed_forward.router",
                shared: "feed_forward.shared_expert",
                ..usual
            },
            _ => usual,
        }
    }
}
