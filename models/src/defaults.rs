//! What entries mean that a `config.json` leaves out.

use crate::family::Family;

/// What an absent entry means where the classes of transformers differ.
pub(crate) struct Defaults {
    /// As many as query heads, if `None`.
    pub(crate) kv_heads: Option<usize>,
    /// Hidden size by query heads, if `None`.
    pub(crate) head_size: Option<usize>,
    pub(crate) positions: usize,
    pub(crate) norm_eps: f64,
    pub(crate) theta: f64,
    pub(crate) tied: bool,
    pub(crate) pad: Option<usize>,
    pub(crate) eos: &'static [u32],
    pub(crate) dropout: f64,
}

/// Those of a Llama.
const LLAMA: Defaults = Defaults {
    kv_heads: None,
    head_size: None,
    positions: 2048,
    norm_eps: 1e-6,
    theta: 10_000.0,
    tied: false,
    pad: None,
    eos: &[2],
    dropout: 0.0,
};

impl Family {
    pub(crate) fn defaults(self) -> Defaults {
        match self {
            Self::Llama => LLAMA,
            Self::Mistral => Defaults { kv_heads: Some(8), positions: 131_072, ..LLAMA },
            Self::Ministral3 => Defaults {
                kv_heads: Some(8),
                head_size: Some(128),
                positions: 262_144,
                norm_eps: 1e-5,
                theta: 1_000_000.0,
                pad: Some(11),
                ..LLAMA
            },
            Self::Qwen2 => Defaults { positions: 32_768, eos: &[], ..LLAMA },
            Self::Qwen3 => Defaults { head_size: Some(128), positions: 32_768, eos: &[], ..LLAMA },
            Self::Phi3 => {
                Defaults { positions: 4096, norm_eps: 1e-5, pad: Some(32_000), eos: &[32_000], ..LLAMA }
            }
            Self::SeedOss => Defaults {
                kv_heads: Some(8),
                head_size: Some(128),
                positions: 524_288,
                pad: Some(1),
                dropout: 0.1,
                ..LLAMA
            },
            Self::SmolLm3 => Defaults {
                kv_heads: Some(4),
                positions: 32_768,
                theta: 2_000_000.0,
                tied: true,
                pad: Some(128_004),
                eos: &[128_001],
                ..LLAMA
            },
            Self::Olmo2 => Defaults { norm_eps: 1e-5, pad: Some(1), eos: &[50_279], ..LLAMA },
            Self::Granite => LLAMA,
            Self::Gemma => Defaults {
                kv_heads: Some(16),
                head_size: Some(256),
                positions: 8192,
                tied: true,
                pad: Some(0),
                eos: &[1],
                ..LLAMA
            },
            Self::Gemma2 => Defaults { kv_heads: Some(4), ..Self::Gemma.defaults() },
            Self::Gemma3 => Defaults {
                kv_heads: Some(4),
                positions: 131_072,
                theta: 1_000_000.0,
                ..Self::Gemma.defaults()
            },
            Self::Gemma4 => Self::Gemma3.defaults(),
            Self::Olmo3 => Defaults { theta: 500_000.0, ..Self::Olmo2.defaults() },
            Self::Exaone4 => Defaults { kv_heads: Some(32), norm_eps: 1e-5, ..LLAMA },
            Self::Glm | Self::Glm4 => Defaults {
                kv_heads: Some(2),
                head_size: Some(128),
                positions: 131_072,
                norm_eps: 1.562_5e-7,
                pad: Some(151_329),
                eos: &[151_329, 151_336, 151_338],
                ..LLAMA
            },
            Self::Ernie45 => Defaults {
                kv_heads: Some(2),
                head_size: Some(128),
                positions: 131_072,
                norm_eps: 1e-5,
                theta: 500_000.0,
                tied: true,
                pad: Some(0),
                ..LLAMA
            },
            Self::Cohere => Defaults { theta: 500_000.0, ..Self::Cohere2.defaults() },
            Self::Cohere2 => Defaults {
                positions: 8192,
                norm_eps: 1e-5,
                tied: true,
                pad: Some(0),
                eos: &[255_001],
                ..LLAMA
            },
            Self::HunYuan => Defaults { norm_eps: 1e-5, pad: Some(0), ..LLAMA },
            Self::Qwen35 => {
                Defaults { kv_heads: Some(4), head_size: Some(256), positions: 32_768, eos: &[], ..LLAMA }
            }
            Self::Mixtral
            | Self::Qwen2Moe
            | Self::Qwen3Moe
            | Self::Olmoe
            | Self::Qwen3Next
            | Self::Qwen35Moe => self.defaults_with_experts(),
            Self::Glm4Moe | Self::Glm4MoeLite | Self::DeepseekV2 | Self::DeepseekV3 | Self::Ernie45Moe => {
                self.defaults_with_experts()
            }
            Self::Llama4 | Self::HunYuanMoe | Self::MiniMaxM2 | Self::GptOss => self.defaults_with_experts(),
        }
    }

    fn defaults_with_experts(self) -> Defaults {
        match self {
            Self::Mixtral => Defaults {
                kv_heads: Some(8),
                positions: 131_072,
                norm_eps: 1e-5,
                theta: 1_000_000.0,
                ..LLAMA
            },
            Self::Llama4 => Defaults {
                kv_heads: Some(8),
                head_size: Some(128),
                positions: 131_072,
                norm_eps: 1e-5,
                theta: 500_000.0,
                ..LLAMA
            },
            Self::Qwen2Moe => Defaults { kv_heads: Some(16), positions: 32_768, eos: &[], ..LLAMA },
            Self::Qwen3Moe => Defaults { kv_heads: Some(4), positions: 32_768, eos: &[], ..LLAMA },
            Self::Olmoe => Defaults { positions: 4096, ..Self::Olmo2.defaults() },
            Self::Glm4Moe => {
                Defaults { kv_heads: Some(8), positions: 131_072, norm_eps: 1e-5, eos: &[], ..LLAMA }
            }
            Self::Qwen3Next | Self::Qwen35Moe => Defaults { kv_heads: Some(2), ..Self::Qwen35.defaults() },
            Self::Glm4MoeLite => Defaults { positions: 202_752, norm_eps: 1e-5, eos: &[1], ..LLAMA },
            Self::DeepseekV3 => Defaults { positions: 4096, eos: &[1], ..LLAMA },
            Self::MiniMaxM2 => Defaults {
                kv_heads: Some(8),
                head_size: Some(128),
                positions: 196_608,
                theta: 5_000_000.0,
                eos: &[200_020],
                ..LLAMA
            },
            Self::GptOss => Defaults {
                kv_heads: Some(8),
                head_size: Some(64),
                positions: 131_072,
                norm_eps: 1e-5,
                theta: 150_000.0,
                eos: &[],
                ..LLAMA
            },
            Self::Ernie45Moe => Defaults { kv_heads: Some(4), head_size: None, ..Self::Ernie45.defaults() },
            Self::HunYuanMoe => Self::HunYuan.defaults(),
            _ => LLAMA,
        }
    }
}
