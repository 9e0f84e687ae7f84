//! Attention through a latent, as `config.json` describes it.

use crate::entries::Entries;
use crate::family::Family;
use crate::rope::yarn_scale;
use crate::{ModelConfig, ModelError, Result};
use terrace_kernels::RopePairs;
use terrace_kernels::cpu::HEAD_MAX;

/// Attention whose keys and values are made of a latent (DeepSeek-AI, "DeepSeek-V2", arXiv 2405.04434).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentAttention {
    /// Size of the latent that queries are made of, Q; `None` where they are made of the hidden state itself.
    pub query_rank: Option<usize>,
    /// Size of the latent that keys and values are made of, L.
    pub rank: usize,
    /// Elements of each query and key that are not rotated, N.
    pub plain: usize,
    /// Those behind them that are, P, and are the same in the keys of all heads.
    pub rotated: usize,
    /// Elements of each value, U.
    pub values: usize,
    /// How the rotated ones are paired.
    pub pairs: RopePairs,
}

impl LatentAttention {
    /// `None` of families whose keys and values are made of the hidden state.
    pub(crate) fn parse(entries: &Entries<'_>, family: Family) -> Result<Option<Self>> {
        let (query_rank, plain, values) = match family {
            Family::DeepseekV2 | Family::DeepseekV3 => (1536, 128, 128),
            Family::Glm4MoeLite => (768, 192, 256),
            _ => return Ok(None),
        };
        // That of DeepSeek V2 is the same wherever it is.
        let is_interleaved = family == Family::DeepseekV2 || entries.flag("rope_interleave", true)?;
        let is_direct = entries.has("q_lora_rank") && !entries.has_value("q_lora_rank");
        Ok(Some(Self {
            query_rank: if is_direct { None } else { Some(entries.size_or("q_lora_rank", query_rank)?) },
            rank: entries.size_or("kv_lora_rank", 512)?,
            plain: entries.size_or("qk_nope_head_dim", plain)?,
            rotated: entries.size_or("qk_rope_head_dim", 64)?,
            values: entries.size_or("v_head_dim", values)?,
            pairs: if is_interleaved { RopePairs::Neighbours } else { RopePairs::Halves },
        }))
    }

    /// Elements of each query and key, K.
    pub fn head_size(&self) -> usize {
        self.plain + self.rotated
    }

    /// What scores of attention are multiplied by: `K^-½`, and what a YaRN whose configuration says so adds to it.
    pub(crate) fn scale(&self, entries: &Entries<'_>) -> Result<f32> {
        let plain = (self.head_size() as f64).sqrt().recip();
        for key in ["rope_parameters", "rope_scaling"] {
            let Some(nested) = entries.object(key)?.filter(|nested| !nested.is_empty()) else { continue };
            let (kind, older) = (nested.string("rope_type")?, nested.string("type")?);
            let weight = nested.number_or("mscale_all_dim", 0.0)?;
            if matches!(kind.or(older), None | Some("default")) || weight == 0.0 {
                return Ok(plain as f32);
            }
            let more = yarn_scale(nested.positive("factor")?, weight);
            return Ok((plain * more * more) as f32);
        }
        Ok(plain as f32)
    }

    /// What a hand-made one must fulfil too.
    pub(crate) fn check(&self, config: &ModelConfig) -> Result {
        let refuse = |key: &str, detail: String| Err(ModelError::Config { key: key.into(), detail });
        let (heads, size) = (config.heads, self.head_size());
        if config.kv_heads != heads {
            let detail = format!("is {}; a latent makes keys of all {heads} heads", config.kv_heads);
            return refuse("num_key_value_heads", detail);
        }
        if config.head_size != size {
            let detail = format!("makes heads of {size} elements, not of {}", config.head_size);
            return refuse("qk_nope_head_dim", detail);
        }
        if config.rope.size != self.rotated {
            let detail =
                format!("makes {} of the {} elements that have positions", config.rope.size, self.rotated);
            return refuse("partial_rotary_factor", detail);
        }
        if !self.rotated.is_multiple_of(2) {
            let detail = format!("is {}; rotary embedding needs an even size", self.rotated);
            return refuse("qk_rope_head_dim", detail);
        }
        if self.rank + self.rotated > HEAD_MAX {
            let most = HEAD_MAX - self.rotated.min(HEAD_MAX);
            let detail = format!("is {}; latents of more than {most} are not computed", self.rank);
            return refuse("kv_lora_rank", detail);
        }
        if self.values > size {
            let detail =
                format!("is {}; values larger than keys, of {size} elements, are not computed", self.values);
            return refuse("v_head_dim", detail);
        }
        let sizes = [self.query_rank.unwrap_or(1), self.rank, size + self.values];
        if sizes.iter().any(|size| heads.checked_mul(*size).is_none_or(|width| width > WIDTH_MAX)) {
            let detail = format!("is {heads}; with {sizes:?} elements of latents and heads that is too many");
            return refuse("num_attention_heads", detail);
        }
        Ok(())
    }
}

/// Far wider than any model is; a broken number must not become an allocation.
const WIDTH_MAX: usize = 1 << 32;
