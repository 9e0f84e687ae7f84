//! The families of models, and what their configuration classes in transformers fill in.

use crate::composite::COMPOSITES;
use crate::config::Norms;
use crate::entries::Entries;
use crate::fused::Packing;
use crate::{ModelError, Result};
use terrace_kernels::RopePairs;

/// Architectures that [`build`](crate::build) knows, as `architectures` and `model_type` spell them.
const FAMILIES: [(Family, &str, &str); 38] = [
    (Family::Llama, "LlamaForCausalLM", "llama"),
    (Family::Mistral, "MistralForCausalLM", "mistral"),
    (Family::Ministral3, "Ministral3ForCausalLM", "ministral3"),
    (Family::Qwen2, "Qwen2ForCausalLM", "qwen2"),
    (Family::Qwen3, "Qwen3ForCausalLM", "qwen3"),
    (Family::Phi3, "Phi3ForCausalLM", "phi3"),
    (Family::SeedOss, "SeedOssForCausalLM", "seed_oss"),
    (Family::SmolLm3, "SmolLM3ForCausalLM", "smollm3"),
    (Family::Olmo2, "Olmo2ForCausalLM", "olmo2"),
    (Family::Olmo3, "Olmo3ForCausalLM", "olmo3"),
    (Family::Granite, "GraniteForCausalLM", "granite"),
    (Family::Gemma, "GemmaForCausalLM", "gemma"),
    (Family::Gemma2, "Gemma2ForCausalLM", "gemma2"),
    (Family::Gemma3, "Gemma3ForCausalLM", "gemma3_text"),
    (Family::Gemma4, "Gemma4ForCausalLM", "gemma4_text"),
    (Family::Exaone4, "Exaone4ForCausalLM", "exaone4"),
    (Family::Glm, "GlmForCausalLM", "glm"),
    (Family::Glm4, "Glm4ForCausalLM", "glm4"),
    (Family::Ernie45, "Ernie4_5ForCausalLM", "ernie4_5"),
    (Family::Cohere, "CohereForCausalLM", "cohere"),
    (Family::Cohere2, "Cohere2ForCausalLM", "cohere2"),
    (Family::HunYuan, "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    (Family::Llama4, "Llama4ForCausalLM", "llama4_text"),
    (Family::Mixtral, "MixtralForCausalLM", "mixtral"),
    (Family::Qwen2Moe, "Qwen2MoeForCausalLM", "qwen2_moe"),
    (Family::Qwen3Moe, "Qwen3MoeForCausalLM", "qwen3_moe"),
    (Family::Olmoe, "OlmoeForCausalLM", "olmoe"),
    (Family::Qwen3Next, "Qwen3NextForCausalLM", "qwen3_next"),
    (Family::Qwen35, "Qwen3_5ForCausalLM", "qwen3_5_text"),
    (Family::Qwen35Moe, "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    (Family::Glm4Moe, "Glm4MoeForCausalLM", "glm4_moe"),
    (Family::Glm4MoeLite, "Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
    (Family::DeepseekV2, "DeepseekV2ForCausalLM", "deepseek_v2"),
    (Family::DeepseekV3, "DeepseekV3ForCausalLM", "deepseek_v3"),
    (Family::Ernie45Moe, "Ernie4_5_MoeForCausalLM", "ernie4_5_moe"),
    (Family::HunYuanMoe, "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
    (Family::MiniMaxM2, "MiniMaxM2ForCausalLM", "minimax_m2"),
    (Family::GptOss, "GptOssForCausalLM", "gpt_oss"),
];

/// A line of models that share their structure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Llama 2, 3, 3.1 and what follows their layout.
    Llama,
    /// Llama 4 (Scout, Maverick): three layers in four see chunks of positions, the fourth everything and has no positions; experts, whose inputs
    /// a router multiplies, in all layers or every other one.
    Llama4,
    /// Mistral: a sliding window over all layers.
    Mistral,
    /// Ministral 3, Devstral 2: a Mistral whose queries are multiplied by a number behind the context of its training, up to which it is computed.
    Ministral3,
    /// Qwen 2 and 2.5: biased query, key and value projections.
    Qwen2,
    /// Qwen 3: queries and keys are normalized per head.
    Qwen3,
    /// Phi 3 and 4: files hold query, key and value projections as one tensor, and gate and up as one; some rotate a part of each head.
    Phi3,
    /// Seed-OSS: biased query, key and value projections, dropout in training.
    SeedOss,
    /// SmolLM 3: some layers have no rotary embedding.
    SmolLm3,
    /// OLMo 2: what attention and feed-forward give is normalized, and not what they are given; so are queries and keys, all heads together.
    Olmo2,
    /// OLMo 3: an OLMo 2 of which three layers in four have a window, with a rotary embedding of their own.
    Olmo3,
    /// Granite 3: embeddings, scores, what is added to the residual, and logits are multiplied by numbers.
    Granite,
    /// Gemma 1: the weights of norms are added to 1, and embeddings multiplied by the root of the hidden size.
    Gemma,
    /// Gemma 2: a Gemma with norms on both sides, windows in every other layer, and caps of scores and of logits.
    Gemma2,
    /// Gemma 3 for text alone: a Gemma with norms on both sides, normalized queries and keys, and windows in five layers of six.
    Gemma3,
    /// Gemma 4 (31B, 26B-A4B): norms multiply by their weights, values have norms, what a layer gives is multiplied by a number of the files;
    /// layers without a window have other heads and no projection of values; some have experts beside the feed-forward of all tokens.
    Gemma4,
    /// EXAONE 4: an OLMo 2 that normalizes each head of queries and keys, and whose larger model has windows in three layers of four and no
    /// positions in the others.
    Exaone4,
    /// GLM 4 of 2024: half of each head is rotated, in pairs of neighbours; files hold gate and up projections as one tensor.
    Glm,
    /// GLM 4 of 2025 (0414) and Z1: the same with norms on both sides of attention and feed-forward.
    Glm4,
    /// ERNIE 4.5 without experts (0.3B): a Llama that rotates pairs of neighbours.
    Ernie45,
    /// Command R, Aya: attention and feed-forward side by side behind one norm, which takes the mean away; logits are multiplied.
    Cohere,
    /// Command R7B, Command A: the same with windows in three layers of four and no positions in the others.
    Cohere2,
    /// Hunyuan (0.5B to 7B): queries and keys are normalized per head when they have been rotated.
    HunYuan,
    /// Mixtral: a Mistral with experts, of which each token goes through two.
    Mixtral,
    /// Qwen 1.5 and 2 with experts (A2.7B, 57B-A14B), and a feed-forward beside them of which each token has a part.
    Qwen2Moe,
    /// Qwen 3 with experts (30B-A3B, 235B-A22B).
    Qwen3Moe,
    /// OLMoE: experts, and queries and keys that are normalized with all heads together.
    Olmoe,
    /// Qwen 3 Next and Qwen 3 Coder Next (80B-A3B): a Qwen 3.5 with experts of some layers, whose files hold what the delta rule is given by heads of
    /// keys, and experts apart.
    Qwen3Next,
    /// Qwen 3.5: the gated delta rule in three layers of four, gates behind attention in the fourth, whose files hold them with the queries; norms
    /// whose weights are added to 1, and a quarter of each head rotated.
    Qwen35,
    /// Qwen 3.5 with experts, and one beside them as in Qwen 2.
    Qwen35Moe,
    /// GLM 4.5, 4.6 and 4.7 with experts: chosen by sigmoids and a bias, with a feed-forward beside them; half of each head is rotated.
    Glm4Moe,
    /// GLM 4.7 Flash: a smaller one, with the attention of DeepSeek.
    Glm4MoeLite,
    /// DeepSeek V2 with experts: keys and values are made of a latent; experts beside one for all tokens, in the larger models in groups.
    DeepseekV2,
    /// DeepSeek V3 and R1, Kimi K2, Moonlight: the same attention, experts chosen by sigmoids and a bias.
    DeepseekV3,
    /// ERNIE 4.5 with experts (21B-A3B, 300B-A47B): chosen by a softmax and a bias, behind layers without, with a feed-forward beside them.
    Ernie45Moe,
    /// Hunyuan A13B: the same with experts in all layers, and a feed-forward beside them.
    HunYuanMoe,
    /// MiniMax M2: experts chosen by sigmoids and a bias, queries and keys normalized with all heads together, half of each head rotated.
    MiniMaxM2,
    /// gpt-oss: experts with biases, attention sinks, windows in every other layer; files hold the experts of a layer together, often as MXFP4.
    GptOss,
}

/// Which layers have biases.
pub(crate) struct Biases {
    pub(crate) qkv: bool,
    pub(crate) output: bool,
    pub(crate) mlp: bool,
}

impl Family {
    /// The class of transformers.
    pub(crate) fn architecture(self) -> &'static str {
        FAMILIES.iter().find(|known| known.0 == self).map_or("", |known| known.1)
    }

    /// What training drops or disturbs, as config.json spells it.
    pub(crate) fn dropouts(self) -> &'static [&'static str] {
        match self {
            Self::Phi3 => &["attention_dropout", "resid_pdrop", "embd_pdrop"],
            Self::SeedOss => &["attention_dropout", "residual_dropout"],
            Self::Mixtral | Self::MiniMaxM2 => &["attention_dropout", "router_jitter_noise"],
            _ => &["attention_dropout"],
        }
    }

    pub(crate) fn biases(self, entries: &Entries<'_>) -> Result<Biases> {
        let attention = entries
            .flag("attention_bias", matches!(self, Self::SeedOss | Self::GptOss | Self::Glm | Self::Glm4))?;
        let qkv = match self {
            Self::Qwen2 => true,
            Self::Qwen2Moe => entries.flag("qkv_bias", true)?,
            Self::Mistral | Self::Ministral3 | Self::Phi3 | Self::Mixtral | Self::MiniMaxM2 => false,
            Self::Exaone4 | Self::Ernie45 | Self::Ernie45Moe => false,
            _ => attention,
        };
        let output = match self {
            Self::SeedOss => entries.flag("attention_out_bias", false)?,
            Self::Mistral | Self::Qwen2 | Self::Phi3 | Self::Mixtral | Self::Qwen2Moe | Self::Glm4Moe => {
                false
            }
            Self::Ministral3 | Self::MiniMaxM2 | Self::Glm | Self::Glm4 => false,
            Self::Exaone4 | Self::Ernie45 | Self::Ernie45Moe => false,
            _ => attention,
        };
        let mlp = match self {
            Self::Llama | Self::SeedOss | Self::SmolLm3 | Self::Granite => entries.flag("mlp_bias", false)?,
            _ => false,
        };
        Ok(Biases { qkv, output, mlp })
    }

    /// What files hold as one tensor.
    pub(crate) fn packing(self) -> Packing {
        match self {
            Self::Phi3 => Packing::Projections,
            Self::Glm | Self::Glm4 => Packing::GateAndUp,
            Self::GptOss => Packing::Experts,
            Self::Llama4 => Packing::ExpertsTurned,
            Self::Qwen35 => Packing::Gates,
            Self::Qwen35Moe => Packing::GatesAndExperts,
            Self::Qwen3Next => Packing::GatesAndDelta,
            Self::Gemma4 => Packing::ExpertsInOrder,
            _ => Packing::Apart,
        }
    }

    pub(crate) fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma | Self::Gemma2 | Self::Gemma3 | Self::Gemma4)
    }

    pub(crate) fn is_cohere(self) -> bool {
        matches!(self, Self::Cohere | Self::Cohere2)
    }

    /// What is added to mean squares, as config.json spells it.
    pub(crate) fn norm_eps(self) -> &'static str {
        if self.is_cohere() { "layer_norm_eps" } else { "rms_norm_eps" }
    }

    /// What logits are multiplied or divided by, as config.json spells it.
    pub(crate) fn logits_key(self) -> &'static str {
        if self.is_cohere() { "logit_scale" } else { "logits_scaling" }
    }

    /// The weights of norms are added to 1.
    pub(crate) fn norm_plus_one(self) -> bool {
        matches!(self, Self::Gemma | Self::Gemma2 | Self::Gemma3) || self.has_delta()
    }

    /// The gated delta rule takes the place of attention in some layers.
    pub(crate) fn has_delta(self) -> bool {
        matches!(self, Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe)
    }

    /// The part of each head that is rotated where configurations do not say.
    pub(crate) fn rotated_part(self) -> f64 {
        match self {
            Self::Glm4Moe | Self::Glm | Self::Glm4 => 0.5,
            Self::Qwen3Next | Self::Qwen35 | Self::Qwen35Moe => 0.25,
            _ => 1.0,
        }
    }

    /// How the elements of a head that are rotated are paired.
    pub(crate) fn rotated_pairs(self) -> RopePairs {
        match self {
            Self::Glm | Self::Glm4 | Self::Ernie45 | Self::Ernie45Moe => RopePairs::Neighbours,
            Self::Cohere | Self::Cohere2 | Self::Llama4 => RopePairs::Neighbours,
            _ => RopePairs::Halves,
        }
    }

    /// What the feed-forward of all tokens is called.
    pub(crate) fn feed_forward(self) -> &'static str {
        if self == Self::Llama4 { "feed_forward" } else { "mlp" }
    }

    pub(crate) fn norms(self) -> Norms {
        match self {
            Self::Olmo2 | Self::Olmo3 | Self::Exaone4 => Norms::After,
            Self::Gemma2 | Self::Gemma3 | Self::Gemma4 | Self::Glm4 => Norms::Both,
            _ => Norms::Before,
        }
    }

    /// What norms of queries and keys are called.
    pub(crate) fn norms_of_heads(self) -> [&'static str; 2] {
        match self {
            Self::HunYuan | Self::HunYuanMoe => ["self_attn.query_layernorm", "self_attn.key_layernorm"],
            _ => ["self_attn.q_norm", "self_attn.k_norm"],
        }
    }

    /// What norms before and behind attention are called.
    pub(crate) fn norms_of_attention(self) -> [&'static str; 2] {
        match self {
            Self::Glm4 => ["input_layernorm", "post_self_attn_layernorm"],
            _ => ["input_layernorm", "post_attention_layernorm"],
        }
    }

    /// What those before and behind the feed-forward are called.
    pub(crate) fn norms_of_feed_forward(self) -> [&'static str; 2] {
        match self {
            Self::Gemma2 | Self::Gemma3 | Self::Gemma4 => {
                ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            }
            Self::Glm4 => ["post_attention_layernorm", "post_mlp_layernorm"],
            _ => ["post_attention_layernorm", "post_feedforward_layernorm"],
        }
    }
}

/// The family that a `config.json` names.
pub(crate) fn family(entries: &Entries<'_>) -> Result<Family> {
    let architecture = entries.first_string("architectures")?;
    let model_type = entries.string("model_type")?;
    let of = |by: fn(&(Family, &'static str, &'static str)) -> &'static str, name: Option<&str>| {
        FAMILIES.iter().find(|known| Some(by(known)) == name).map(|(family, ..)| *family)
    };
    if let (Some(by_name), Some(by_type)) =
        (of(|known| known.1, architecture), of(|known| known.2, model_type))
        && by_name != by_type
    {
        let (architecture, model_type) = (architecture.unwrap_or_default(), model_type.unwrap_or_default());
        let detail = format!(
            "is \"{model_type}\" and `architectures` names {architecture}: two different models; transformers goes by model_type; correct \
             the one that is wrong"
        );
        return Err(entries.error("model_type", detail));
    }
    let found = FAMILIES.iter().find(|(_, name, kind)| match architecture {
        Some(architecture) => architecture == *name,
        None => model_type == Some(*kind),
    });
    let supported: Vec<&str> = FAMILIES
        .iter()
        .map(|known| known.1)
        .chain(COMPOSITES.iter().map(|known| known.architecture))
        .collect();
    found.map(|(family, ..)| *family).ok_or_else(|| ModelError::Unsupported {
        what: if architecture.is_some() { "architecture" } else { "model_type" }.into(),
        found: architecture.or(model_type).map_or("(none)".into(), |name| format!("\"{name}\"")),
        supported: supported.join(", "),
    })
}
