//! Feed-forwards with experts, as `config.json` describes them.

use crate::entries::Entries;
use crate::family::Family;
use crate::{ModelError, Result};

/// Experts, of which each token goes through a few.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mixture {
    /// Experts of a layer, E.
    pub experts: usize,
    /// How many of them a token goes through, X.
    pub chosen: usize,
    /// Feed-forward size of each.
    pub feed_forward: usize,
    /// The weights of those that a token goes through are divided by their sum.
    pub normalize: bool,
    /// The router and the experts have biases.
    pub biased: bool,
    /// Layers that have one feed-forward for all tokens instead.
    pub dense_layers: Vec<usize>,
}

/// What parameters of experts are called within a layer.
pub(crate) struct ExpertNames {
    pub(crate) module: &'static str,
    pub(crate) router: &'static str,
    pub(crate) gate: &'static str,
    pub(crate) up: &'static str,
    pub(crate) down: &'static str,
}

impl Mixture {
    /// `None` if the family has no experts.
    pub(crate) fn parse(entries: &Entries<'_>, family: Family, layers: usize) -> Result<Option<Self>> {
        // Newer folders may use the other name.
        let experts = |keys: [&str; 2], default: usize| {
            let key = if entries.has_value(keys[0]) { keys[0] } else { keys[1] };
            entries.size_or(key, default)
        };
        let chosen = |default: usize| entries.size_or("num_experts_per_tok", default);
        let normalize = || entries.flag("norm_topk_prob", false);
        let of_num_experts = ["num_experts", "num_local_experts"];
        let of_num_local_experts = ["num_local_experts", "num_experts"];
        Ok(match family {
            Family::Mixtral => Some(Self {
                experts: experts(of_num_local_experts, 8)?,
                chosen: chosen(2)?,
                feed_forward: entries.size("intermediate_size")?,
                normalize: true,
                biased: false,
                dense_layers: Vec::new(),
            }),
            Family::Olmoe => Some(Self {
                experts: experts(of_num_experts, 64)?,
                chosen: chosen(8)?,
                feed_forward: entries.size("intermediate_size")?,
                normalize: normalize()?,
                biased: false,
                dense_layers: Vec::new(),
            }),
            Family::Qwen3Moe => Some(Self {
                experts: experts(of_num_experts, 128)?,
                chosen: chosen(8)?,
                feed_forward: entries.size_or("moe_intermediate_size", 768)?,
                normalize: normalize()?,
                biased: false,
                dense_layers: dense_layers(entries, layers)?,
            }),
            Family::GptOss => Some(Self {
                experts: experts(of_num_local_experts, 128)?,
                chosen: chosen(4)?,
                feed_forward: entries.size("intermediate_size")?,
                normalize: true,
                biased: true,
                dense_layers: Vec::new(),
            }),
            _ => None,
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
        Ok(())
    }
}

/// Far more than any model has; a broken number must not become an allocation.
const EXPERTS_MAX: usize = 1 << 12;
const ALL_EXPERTS_MAX: usize = 1 << 18;

/// Those that a list names, and all but the last of every `decoder_sparse_step`.
fn dense_layers(entries: &Entries<'_>, layers: usize) -> Result<Vec<usize>> {
    let step = entries.size_or("decoder_sparse_step", 1)?;
    let listed = entries.numbers("mlp_only_layers")?.unwrap_or_default();
    let is_dense = |layer: &usize| !(layer + 1).is_multiple_of(step) || listed.contains(&(*layer as f64));
    Ok((0..layers).filter(is_dense).collect())
}

impl Family {
    /// Of a family with experts.
    pub(crate) fn expert_names(self) -> ExpertNames {
        let usual = ExpertNames {
            module: "mlp",
            router: "mlp.gate",
            gate: "gate_proj",
            up: "up_proj",
            down: "down_proj",
        };
        match self {
            Self::Mixtral => ExpertNames {
                module: "block_sparse_moe",
                router: "block_sparse_moe.gate",
                gate: "w1",
                up: "w3",
                down: "w2",
            },
            Self::GptOss => ExpertNames { router: "mlp.router", ..usual },
            _ => usual,
        }
    }
}
