//! The shape of a Llama-like model of about so many parameters, for plans of models that do not exist; those of all models, in words.

use crate::progress::count;
use serde_json::{Value, json};
use terrace_models::{Mixture, ModelConfig};

/// Size of a head, as in all larger models of the family.
const HEAD: u64 = 128;
/// Heads for keys and values.
const KV_HEADS: u64 = 8;
/// Hidden size to layers in models of the family: 128 at 8B, 102 at 70B, 130 at 405B.
const HIDDEN_PER_LAYER: f64 = 110.0;
/// The smallest model for which such a shape makes sense.
const PARAMETERS_MIN: u64 = 50_000_000;
/// The largest.
const PARAMETERS_MAX: u64 = 20_000_000_000_000;

/// A `config.json`.
///
/// # Errors
/// There is no such shape; why.
pub fn config_for(parameters: u64) -> Result<Value, String> {
    if !(PARAMETERS_MIN..=PARAMETERS_MAX).contains(&parameters) {
        return Err(
            "shapes are known for 50m to 20t parameters; write a config.json and name it with --model".into(),
        );
    }
    let vocab = if parameters < 1_000_000_000 { 32_000 } else { 128_256 };
    let (mut best, mut least) = ((0, 0), f64::MAX);
    for heads in 4..512 {
        let hidden = heads * HEAD;
        let embeddings = 2 * vocab * hidden;
        let layers = parameters.saturating_sub(embeddings) as f64 / layer(hidden) as f64;
        let layers = layers.round().max(1.0) as u64;
        // Query heads are a multiple of those for keys.
        if heads % kv_heads(heads) != 0 {
            continue;
        }
        let error = (embeddings + layers * layer(hidden)) as f64 / parameters as f64 - 1.0;
        let slender = (hidden as f64 / layers as f64 / HIDDEN_PER_LAYER).ln();
        let badness = 60.0 * error.abs() + slender.abs();
        if badness < least {
            (best, least) = ((hidden, layers), badness);
        }
    }
    let (hidden, layers) = best;
    Ok(json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": feed_forward(hidden),
        "num_hidden_layers": layers,
        "num_attention_heads": hidden / HEAD,
        "num_key_value_heads": kv_heads(hidden / HEAD),
        "max_position_embeddings": 131_072,
    }))
}

fn kv_heads(heads: u64) -> u64 {
    KV_HEADS.min(heads)
}

fn feed_forward(hidden: u64) -> u64 {
    (hidden * 7 / 2).next_multiple_of(256)
}

/// Parameters of a layer.
fn layer(hidden: u64) -> u64 {
    let kv = kv_heads(hidden / HEAD) * HEAD;
    2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * feed_forward(hidden) + 2 * hidden
}

/// The shape of a model, in words.
pub fn words(m: &ModelConfig, parameters: u64) -> String {
    let feed_forward = match &m.mixture {
        Some(Mixture { experts, chosen, feed_forward, shared, is_beside_dense, .. }) => {
            let dense = is_beside_dense.then_some(m.feed_forward);
            let beside = shared.map(|shared| shared.feed_forward).or(dense);
            let beside = beside.map(|beside| format!(" and one of {beside} for all"));
            format!("{chosen} of {experts} experts of {feed_forward}{}", beside.unwrap_or_default())
        }
        None => format!("feed-forward {}", m.feed_forward),
    };
    let delta = m.delta.as_ref().map(|delta| format!("{} with the gated delta rule; ", delta.layers.len()));
    let delta = delta.unwrap_or_default();
    let others = m.full_heads.filter(|heads| heads.count != m.kv_heads);
    let others = others.map(|heads| format!(" or {}", heads.count)).unwrap_or_default();
    format!(
        "{} parameters: {} layers of {} ({delta}{feed_forward}), {} heads, {}{others} key/value heads, vocabulary {}",
        count(parameters as f64),
        m.layers,
        m.hidden,
        m.heads,
        m.kv_heads,
        m.vocab
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_models::{ModelConfig, param_count};

    #[test]
    fn shapes_are_near_what_was_asked_for() {
        for parameters in [124_000_000, 1_000_000_000, 8_000_000_000, 40_000_000_000, 175_000_000_000] {
            let config = ModelConfig::parse(&config_for(parameters).unwrap().to_string()).unwrap();
            let ratio = param_count(&config) as f64 / parameters as f64;
            assert!((0.96..1.04).contains(&ratio), "{parameters}: {ratio}, {config:?}");
            let slender = config.hidden as f64 / config.layers as f64;
            assert!((20.0..250.0).contains(&slender), "{parameters}: {config:?}");
        }
        assert!(config_for(7).unwrap_err().contains("config.json"));
    }
}
