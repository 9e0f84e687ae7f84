//! Key/value heads of layers that see everything, where a configuration has others there: Gemma 4.

use crate::entries::Entries;
use crate::rope::Rope;
use crate::{ModelConfig, ModelError, QkNorm, Result};
use terrace_kernels::cpu::HEAD_MAX;

/// Heads of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KvHeads {
    /// How many, G.
    pub count: usize,
    /// Elements of each, and of each query head, K.
    pub size: usize,
}

/// What may differ from layer to layer.
const SIZE: &str = "head_dim";
const COUNT: &str = "num_key_value_heads";

impl KvHeads {
    /// Those of layers with a window, and those of the others, unless they are the same. `usual` is what the configuration says of all.
    ///
    /// Folders say it of kinds of layers (`global_head_dim`, `num_global_key_value_heads`) or, as transformers makes of that, layer by layer
    /// (`per_layer_config`), which goes first.
    pub(crate) fn by_kind(
        entries: &Entries<'_>,
        windows: &[Option<usize>],
        keys_are_values: bool,
        usual: Self,
    ) -> Result<(Self, Option<Self>)> {
        let has_window = |layer: usize| windows[layer].is_some();
        let of_layers = if entries.has(LAYERS) {
            by_layer(entries, windows.len(), usual)?
        } else {
            let size = entries.size_or("global_head_dim", 512)?;
            let count = entries.optional_size("num_global_key_value_heads")?.filter(|_| keys_are_values);
            let full = Self { count: count.unwrap_or(usual.count), size };
            (0..windows.len()).map(|layer| if has_window(layer) { usual } else { full }).collect()
        };
        let of_kind = |window: bool| {
            let mut kind = (0..windows.len()).filter(|layer| has_window(*layer) == window);
            let first = kind.next().map(|layer| of_layers[layer]);
            match kind.find(|layer| Some(of_layers[*layer]) != first) {
                Some(layer) => Err(ModelError::Unsupported {
                    what: LAYERS.into(),
                    found: format!("layer {layer} with other heads than those of its kind before it"),
                    supported: "the same heads in all layers with a window, and the same in all others"
                        .into(),
                }),
                None => Ok(first),
            }
        };
        Ok(match (of_kind(true)?, of_kind(false)?) {
            (Some(windowed), full) => (windowed, full.filter(|full| *full != windowed)),
            (None, full) => (full.unwrap_or(usual), None),
        })
    }
}

/// Layers by their numbers, and what of each is not as usual.
const LAYERS: &str = "per_layer_config";

fn by_layer(entries: &Entries<'_>, layers: usize, usual: KvHeads) -> Result<Vec<KvHeads>> {
    let mut all = vec![usual; layers];
    let Some(others) = entries.object(LAYERS)? else { return Ok(all) };
    for key in others.keys() {
        let layer = key.parse().ok().filter(|layer| *layer < layers);
        let layer: usize = layer.ok_or_else(|| others.error(key, format!("is none of {layers} layers")))?;
        let Some(of_layer) = others.object(key)? else { continue };
        if let Some(other) = of_layer.keys().find(|key| ![SIZE, COUNT].contains(key)) {
            return Err(ModelError::Unsupported {
                what: format!("entry of {LAYERS}"),
                found: format!("\"{other}\""),
                supported: format!("\"{SIZE}\", \"{COUNT}\""),
            });
        }
        all[layer] = KvHeads {
            count: of_layer.size_or(COUNT, usual.count)?,
            size: of_layer.size_or(SIZE, usual.size)?,
        };
    }
    Ok(all)
}

/// What of Gemma 4 is not computed.
pub(crate) fn refuse_of_gemma4(entries: &Entries<'_>) -> Result {
    let refuse = |key: &str, found: String, supported: &str| {
        Err(ModelError::Unsupported { what: key.into(), found, supported: supported.into() })
    };
    let key = "use_bidirectional_attention";
    // Pictures see what is behind them then; text does not.
    if let Some(kind) = entries.string(key)?.filter(|kind| *kind != "vision") {
        return refuse(key, format!("\"{kind}\""), "null, \"vision\" (a token of text sees those before it)");
    }
    for (key, default, none) in [
        ("hidden_size_per_layer_input", 256, "0 (layers have no inputs of their own)"),
        ("num_kv_shared_layers", 0, "0 (each layer has keys and values of its own)"),
    ] {
        let found = entries.size_or_zero(key, default)?;
        if found != 0 {
            return refuse(key, found.to_string(), none);
        }
    }
    let key = "use_double_wide_mlp";
    match entries.flag(key, false)? {
        true => refuse(key, "true".into(), "false (feed-forwards of all layers have one size)"),
        false => Ok(()),
    }
}

/// What heads and their rotary embeddings must fulfil.
pub(crate) fn check(config: &ModelConfig) -> Result {
    let refuse = |key: &str, detail: String| Err(ModelError::Config { key: key.into(), detail });
    let usual = KvHeads { count: config.kv_heads, size: config.head_size };
    for KvHeads { count, size } in std::iter::once(usual).chain(config.full_heads) {
        if !config.heads.is_multiple_of(count) {
            let detail = format!("is {count}, which does not divide num_attention_heads = {}", config.heads);
            return refuse("num_key_value_heads", detail);
        }
        if config.latent.is_none() && !size.is_multiple_of(2) {
            return refuse("head_dim", format!("is {size}; rotary embedding needs an even size"));
        }
        if size > HEAD_MAX {
            let detail = format!("is {size}; heads of more than {HEAD_MAX} are not computed");
            return refuse("head_dim", detail);
        }
    }
    let full_size = config.full_heads.map_or(config.head_size, |heads| heads.size);
    let of_kinds = config.window_rope.as_ref().map(|rope| (rope, config.head_size));
    for (Rope { size, .. }, head_size) in std::iter::once((&config.rope, full_size)).chain(of_kinds) {
        if *size > head_size || !size.is_multiple_of(2) {
            let detail = format!("makes {size} of {head_size} elements of a head");
            return refuse("partial_rotary_factor", detail);
        }
    }
    let by_heads = config.value_norm && config.qk_norm == Some(QkNorm::PerHead);
    if (config.value_norm || config.keys_are_values) && !by_heads {
        let detail = "is for models that normalize each head of queries, keys and values";
        return refuse("attention_k_eq_v", detail.into());
    }
    if config.full_heads.is_some() && config.window_rope.is_none() {
        let detail = "is for models whose layers with a window have a rotary embedding of their own";
        return refuse("global_head_dim", detail.into());
    }
    Ok(())
}
