//! Which layers see everything before a token, which a window and which chunks, and which of them know positions.

use crate::entries::Entries;
use crate::family::Family;
use crate::{ModelError, Result};

/// What each layer sees, and where it has positions.
pub(crate) struct Sights {
    /// The sliding window of each layer.
    pub(crate) windows: Vec<Option<usize>>,
    /// The chunks of each layer.
    pub(crate) chunks: Vec<Option<usize>>,
    /// Layers that do not rotate queries and keys.
    pub(crate) unrotated: Vec<usize>,
}

impl Sights {
    pub(crate) fn parse(entries: &Entries<'_>, family: Family, layers: usize) -> Result<Self> {
        let listed = unrotated(entries, family, layers)?;
        if family == Family::Llama4 {
            let chunks = chunks(entries, layers, &listed)?;
            return Ok(Self { windows: vec![None; layers], chunks, unrotated: listed });
        }
        let windows = by_layer(entries, family, layers, &listed)?;
        // What sees everything has no positions, if others have windows.
        let sees_all = |layer: &usize| windows.get(*layer).is_some_and(Option::is_none);
        let unrotated = match family {
            Family::Cohere2 => (0..layers).filter(sees_all).collect(),
            Family::Exaone4 if entries.has_value(SIZE) || !entries.has(SIZE) => {
                (0..layers).filter(sees_all).collect()
            }
            _ => listed,
        };
        Ok(Self { windows, chunks: vec![None; layers], unrotated })
    }
}

const SIZE: &str = "sliding_window";

/// The chunks of each layer: of those that are listed as such, or of those that have positions.
fn chunks(entries: &Entries<'_>, layers: usize, unrotated: &[usize]) -> Result<Vec<Option<usize>>> {
    let key = "attention_chunk_size";
    let size = match entries.optional_size(key)? {
        None if !entries.has(key) => Some(8192),
        size => size,
    };
    let Some(kinds) = entries.strings("layer_types")? else {
        return Ok((0..layers).map(|layer| size.filter(|_| !unrotated.contains(&layer))).collect());
    };
    let of_layer = |kind: &&str| match (*kind, size) {
        ("full_attention", _) => Ok(None),
        ("chunked_attention", Some(size)) => Ok(Some(size)),
        ("chunked_attention", None) => {
            Err(entries.error(key, "is null, and layer_types names chunked_attention layers".into()))
        }
        (other, _) => Err(ModelError::Unsupported {
            what: "layer_types entry".into(),
            found: format!("\"{other}\""),
            supported: "\"full_attention\", \"chunked_attention\"".into(),
        }),
    };
    match kinds.len() == layers {
        true => kinds.iter().map(of_layer).collect(),
        false => {
            Err(entries.error("layer_types", format!("has {} entries for {layers} layers", kinds.len())))
        }
    }
}

/// Layers that a configuration names: none, but in SmolLM 3 and Llama 4 those that a list has a 0 for, or the last of every
/// `no_rope_layer_interval`.
fn unrotated(entries: &Entries<'_>, family: Family, layers: usize) -> Result<Vec<usize>> {
    if !matches!(family, Family::SmolLm3 | Family::Llama4) {
        return Ok(Vec::new());
    }
    // A Llama 4 takes an empty list for none.
    let is_said = |listed: &Vec<f64>| family == Family::SmolLm3 || !listed.is_empty();
    let Some(listed) = entries.numbers("no_rope_layers")?.filter(is_said) else {
        let interval = entries.size_or("no_rope_layer_interval", 4)?;
        return Ok((0..layers).filter(|layer| (layer + 1).is_multiple_of(interval)).collect());
    };
    if listed.len() < layers {
        let detail = format!("has {} entries for {layers} layers", listed.len());
        return Err(entries.error("no_rope_layers", detail));
    }
    // Of a longer list the classes of transformers take what they need.
    Ok((0..layers).filter(|layer| listed[*layer] == 0.0).collect())
}

/// The window of each layer, as the family's class in transformers derives it.
fn by_layer(
    entries: &Entries<'_>,
    family: Family,
    layers: usize,
    unrotated: &[usize],
) -> Result<Vec<Option<usize>>> {
    let (is_for_all, default) = match family {
        Family::Llama | Family::SeedOss | Family::Olmo2 | Family::Granite | Family::Gemma => {
            return Ok(vec![None; layers]);
        }
        Family::Olmoe | Family::Glm4Moe | Family::Qwen3Next | Family::Qwen35 | Family::Qwen35Moe => {
            return Ok(vec![None; layers]);
        }
        Family::Glm4MoeLite | Family::DeepseekV2 | Family::DeepseekV3 | Family::MiniMaxM2 => {
            return Ok(vec![None; layers]);
        }
        Family::HunYuan | Family::HunYuanMoe | Family::Cohere | Family::Llama4 => {
            return Ok(vec![None; layers]);
        }
        Family::Glm | Family::Glm4 | Family::Ernie45 | Family::Ernie45Moe => return Ok(vec![None; layers]),
        Family::GptOss => (false, Some(128)),
        Family::Phi3 | Family::Mixtral | Family::Ministral3 => {
            return Ok(vec![entries.optional_size(SIZE)?; layers]);
        }
        Family::Mistral => (true, Some(4096)),
        Family::Qwen2 | Family::Qwen2Moe | Family::Qwen3 | Family::Olmo3 | Family::Gemma3 => {
            (false, Some(4096))
        }
        Family::Exaone4 | Family::Cohere2 => (false, Some(4096)),
        Family::Gemma2 => (false, Some(4096)),
        Family::Gemma4 => (false, Some(512)),
        Family::Qwen3Moe => (entries.flag("use_sliding_window", false)?, Some(4096)),
        Family::SmolLm3 => (false, None),
    };
    let window = match entries.optional_size(SIZE)? {
        None if !entries.has(SIZE) => default,
        window => window,
    };
    // Every so many layers one sees everything.
    let every = match family {
        Family::Olmo3 => Some(4),
        Family::GptOss | Family::Gemma2 => Some(2),
        Family::Gemma3 => Some(entries.size_or("sliding_window_pattern", 6)?),
        Family::Gemma4 => Some(6),
        Family::Exaone4 | Family::Cohere2 if entries.has_value("layer_types") => Some(4),
        Family::Exaone4 | Family::Cohere2 => Some(entries.size_or("sliding_window_pattern", 4)?),
        _ => None,
    };
    let uses_it = is_for_all || every.is_some() || entries.flag("use_sliding_window", false)?;
    let window = if uses_it { window } else { None };
    // A Mistral with kinds of layers is what transformers calls Ministral.
    if let Some(kinds) = entries.strings("layer_types")? {
        return kinds.iter().map(|kind| layer_window(kind, window)).collect();
    }
    if is_for_all {
        return Ok(vec![window; layers]);
    }
    if family == Family::SmolLm3 {
        // What is not rotated by positions sees only some of them.
        return Ok((0..layers).map(|layer| window.filter(|_| unrotated.contains(&layer))).collect());
    }
    if let Some(every) = every {
        return Ok((0..layers).map(|layer| window.filter(|_| !(layer + 1).is_multiple_of(every))).collect());
    }
    let full_layers = entries.size_or_zero("max_window_layers", 28)?;
    if family == Family::Qwen2Moe {
        // Its class means every other one of the layers before that.
        let has_window = |layer: &usize| layer.is_multiple_of(2) && *layer < full_layers;
        return Ok((0..layers).map(|layer| window.filter(|_| has_window(&layer))).collect());
    }
    Ok((0..layers).map(|layer| window.filter(|_| layer >= full_layers)).collect())
}

fn layer_window(kind: &str, window: Option<usize>) -> Result<Option<usize>> {
    match kind {
        "full_attention" => Ok(None),
        "sliding_attention" => window.map(Some).ok_or_else(|| ModelError::Config {
            key: "layer_types".into(),
            detail: "names sliding_attention layers, but use_sliding_window and sliding_window set no window"
                .into(),
        }),
        other => Err(ModelError::Unsupported {
            what: "layer_types entry".into(),
            found: format!("\"{other}\""),
            supported: "\"full_attention\", \"sliding_attention\"".into(),
        }),
    }
}
