//! Folders that hold a language model as a part, beside what reads pictures for it.
//!
//! The language model is trained and generated from as one that has its folder to itself; tensors of the rest travel into exports as they
//! are. What is said about it lies under `text_config`, or among the rest, and an absent entry takes the default of the part's own
//! configuration class.

use crate::entries::Entries;
use crate::json::parse_json;
use crate::{ModelError, Result};
use serde_json::{Map, Value};

/// A class of transformers whose folders are read, and the language models that may be in them.
pub(crate) struct Composite {
    pub(crate) architecture: &'static str,
    model_type: &'static str,
    /// The first, if its type is not said.
    parts: &'static [Part],
    says: Says,
}

/// Where a composite's configuration says what.
#[derive(Clone, Copy, PartialEq)]
enum Says {
    /// What the language model is: among the rest, if not under a key of its own. Whether its head is tied: at either place.
    Anywhere,
    /// The first under a key of its own alone.
    Apart,
    /// The same, and what the whole says of the head counts only where the part says nothing: savers of different age mean different things.
    OfThePart,
}

/// A language model as a part.
struct Part {
    model_type: &'static str,
    /// What is read in its place.
    read_as: &'static str,
    /// Entries that are not there, where the defaults are others than those of `read_as` by itself, or where that has none.
    absent: &'static str,
}

pub(crate) const COMPOSITES: [Composite; 12] = [
    Composite {
        architecture: "Gemma3ForConditionalGeneration",
        model_type: "gemma3",
        parts: &[Part {
            model_type: "gemma3_text",
            read_as: "Gemma3ForCausalLM",
            absent: r#"{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8}"#,
        }],
        says: Says::Apart,
    },
    Composite {
        architecture: "Gemma4ForConditionalGeneration",
        model_type: "gemma4",
        parts: &[Part {
            model_type: "gemma4_text",
            read_as: "Gemma4ForCausalLM",
            absent: r#"{"vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8}"#,
        }],
        says: Says::Apart,
    },
    Composite {
        architecture: "Gemma4UnifiedForConditionalGeneration",
        model_type: "gemma4_unified",
        parts: &[Part {
            model_type: "gemma4_unified_text",
            read_as: "Gemma4ForCausalLM",
            absent: r#"{
                "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
                "max_position_embeddings": 262144, "sliding_window": 1024, "hidden_size_per_layer_input": 0
            }"#,
        }],
        says: Says::Apart,
    },
    Composite {
        architecture: "Llama4ForConditionalGeneration",
        model_type: "llama4",
        parts: &[Part {
            model_type: "llama4_text",
            read_as: "Llama4ForCausalLM",
            absent: r#"{"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 40}"#,
        }],
        says: Says::Apart,
    },
    Composite {
        architecture: "Mistral3ForConditionalGeneration",
        model_type: "mistral3",
        parts: &[MISTRAL, MINISTRAL],
        says: Says::OfThePart,
    },
    Composite {
        architecture: "LlavaForConditionalGeneration",
        model_type: "llava",
        parts: &[LLAMA, MISTRAL, QWEN2],
        says: Says::Apart,
    },
    Composite {
        architecture: "LlavaNextForConditionalGeneration",
        model_type: "llava_next",
        parts: &[LLAMA, MISTRAL, QWEN2],
        says: Says::Apart,
    },
    Composite {
        architecture: "Qwen2VLForConditionalGeneration",
        model_type: "qwen2_vl",
        parts: &[Part { model_type: "qwen2_vl_text", read_as: "Qwen2ForCausalLM", absent: OF_QWEN2_VL }],
        says: Says::Anywhere,
    },
    Composite {
        architecture: "Qwen2_5_VLForConditionalGeneration",
        model_type: "qwen2_5_vl",
        parts: &[Part { model_type: "qwen2_5_vl_text", read_as: "Qwen2ForCausalLM", absent: OF_QWEN2_VL }],
        says: Says::Anywhere,
    },
    Composite {
        architecture: "Qwen3VLForConditionalGeneration",
        model_type: "qwen3_vl",
        parts: &[Part {
            model_type: "qwen3_vl_text",
            read_as: "Qwen3ForCausalLM",
            absent: r#"{
                "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
                "num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 500000.0
            }"#,
        }],
        says: Says::Apart,
    },
    Composite {
        architecture: "Qwen3_5ForConditionalGeneration",
        model_type: "qwen3_5",
        parts: &[Part {
            model_type: "qwen3_5_text",
            read_as: "Qwen3_5ForCausalLM",
            absent: r#"{
                "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16
            }"#,
        }],
        says: Says::Apart,
    },
    Composite {
        architecture: "Qwen3_5MoeForConditionalGeneration",
        model_type: "qwen3_5_moe",
        parts: &[Part {
            model_type: "qwen3_5_moe_text",
            read_as: "Qwen3_5MoeForCausalLM",
            absent: r#"{"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}"#,
        }],
        says: Says::Apart,
    },
];

const LLAMA: Part = Part {
    model_type: "llama",
    read_as: "LlamaForCausalLM",
    absent: r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}"#,
};

const MISTRAL: Part = Part {
    model_type: "mistral",
    read_as: "MistralForCausalLM",
    absent: r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}"#,
};

const MINISTRAL: Part = Part {
    model_type: "ministral3",
    read_as: "Ministral3ForCausalLM",
    absent: r#"{"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34, "num_attention_heads": 32}"#,
};

const QWEN2: Part = Part {
    model_type: "qwen2",
    read_as: "Qwen2ForCausalLM",
    absent: r#"{
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32
    }"#,
};

const OF_QWEN2_VL: &str = r#"{
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80, "rope_theta": 1000000.0, "eos_token_id": 151645
}"#;

/// Under what the language model's part is described, unless it is described among the rest.
pub(crate) const TEXT: &str = "text_config";

/// What is said of the whole and means the language model.
const OF_THE_WHOLE: [&str; 2] = [EOS, "quantization_config"];

const EOS: &str = "eos_token_id";

const TIED: &str = "tie_word_embeddings";

/// The configuration of the language model that a composite's holds, as that of a model by itself; `None` if it is none of a composite.
pub(crate) fn language_model(whole: &Value) -> Result<Option<Value>> {
    let entries = Entries::new(whole)?;
    let (architecture, model_type) = (entries.first_string("architectures")?, entries.string("model_type")?);
    let is_named = |composite: &&Composite| match architecture {
        Some(architecture) => architecture == composite.architecture,
        None => model_type == Some(composite.model_type),
    };
    let Some(composite) = COMPOSITES.iter().find(is_named) else { return Ok(None) };
    let nested = entries.object(TEXT)?;
    let said = nested.as_ref().map(|nested| nested.string("model_type")).transpose()?.flatten();
    let part = match said {
        None => &composite.parts[0],
        Some(said) => composite.parts.iter().find(|part| part.model_type == said).ok_or_else(|| {
            let known: Vec<String> =
                composite.parts.iter().map(|part| format!("\"{}\"", part.model_type)).collect();
            ModelError::Unsupported {
                what: format!("{TEXT}.model_type of {}", composite.architecture),
                found: format!("\"{said}\""),
                supported: known.join(", "),
            }
        })?,
    };
    if nested.is_none() && composite.says != Says::Anywhere {
        return Err(entries.error(TEXT, "is missing: it describes the language model".into()));
    }
    // What is wrong with them is said of where they stand.
    entries.ids(EOS)?;
    let tied = entries.optional_flag(TIED)?;
    let of_part = nested.as_ref().unwrap_or(&entries).optional_flag(TIED)?;
    let described = whole.get(TEXT).filter(|_| nested.is_some()).unwrap_or(whole);
    let mut model = described.as_object().cloned().unwrap_or_default();
    for key in OF_THE_WHOLE {
        if let Some(value) = whole.get(key).filter(|value| !value.is_null()) {
            model.insert(key.into(), value.clone());
        }
    }
    let tied = match composite.says {
        Says::OfThePart => of_part.or(tied),
        _ => [of_part, tied].into_iter().flatten().max(),
    };
    match tied {
        Some(tied) => drop(model.insert(TIED.into(), tied.into())),
        None => drop(model.shift_remove(TIED)),
    }
    model.insert("architectures".into(), vec![part.read_as].into());
    model.shift_remove("model_type");
    fill(&mut model, part.absent);
    plain_positions(&mut model);
    Ok(Some(Value::Object(model)))
}

fn fill(model: &mut Map<String, Value>, absent: &str) {
    let absent = parse_json(absent).expect("defaults are JSON");
    for (key, value) in absent.as_object().into_iter().flatten() {
        // Both spellings of scaling may have a base of their own.
        if !model.contains_key(key) {
            model.insert(key.clone(), value.clone());
        }
    }
}

/// Positions in time, height and width are one and the same for text, so that sections of a head for each change nothing.
fn plain_positions(model: &mut Map<String, Value>) {
    for key in ["rope_parameters", "rope_scaling"] {
        let Some(scaling) = model.get_mut(key).and_then(Value::as_object_mut) else { continue };
        for kind in ["rope_type", "type"] {
            if scaling.get(kind).and_then(Value::as_str) == Some("mrope") {
                scaling.insert(kind.into(), "default".into());
            }
        }
    }
}

/// How files name the tensors of a language model that is a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Naming {
    /// In place of `model.`.
    base: &'static str,
    /// In place of `lm_head.`.
    head: &'static str,
}

const BASE: &str = "model.";
const HEAD: &str = "lm_head.";

/// What a language model has below its base.
const OF_MODEL: [&str; 3] = ["embed_tokens.", LAYERS, "norm."];
const LAYERS: &str = "layers.";

/// By age; the last is that of models that name their other part apart.
const NAMINGS: [Naming; 3] = [
    Naming { base: "language_model.model.", head: "language_model.lm_head." },
    Naming { base: "model.language_model.", head: HEAD },
    Naming { base: BASE, head: HEAD },
];

impl Naming {
    /// That of files with these tensors.
    pub(crate) fn of<'a>(names: impl Iterator<Item = &'a str>) -> Option<Self> {
        let is_layer =
            |name: &str, base| name.strip_prefix(base).is_some_and(|rest| rest.starts_with(LAYERS));
        let found = names.filter_map(|name| NAMINGS.iter().position(|naming| is_layer(name, naming.base)));
        found.min().map(|index| NAMINGS[index])
    }

    /// The parameter that files call so; `None` for a tensor of another part.
    pub(crate) fn parameter(self, name: &str) -> Option<String> {
        if let Some(rest) = name.strip_prefix(self.head) {
            return Some(HEAD.to_owned() + rest);
        }
        // Other parts may be below the same.
        let rest = name.strip_prefix(self.base)?;
        OF_MODEL.iter().any(|of| rest.starts_with(of)).then(|| BASE.to_owned() + rest)
    }

    /// What files call a parameter.
    pub(crate) fn in_files(self, parameter: &str) -> String {
        let renamed = |from: &str, to: &str| Some(to.to_owned() + parameter.strip_prefix(from)?);
        renamed(BASE, self.base).or_else(|| renamed(HEAD, self.head)).unwrap_or_else(|| parameter.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_naming_is_found_and_inverted() {
        let (layer, head) = ("model.layers.3.mlp.up_proj.weight", "lm_head.weight");
        let other = "vision_tower.layers.3.mlp.up_proj.weight";
        for naming in NAMINGS {
            let files = [other.to_owned(), naming.in_files(head), naming.in_files(layer)];
            let found = Naming::of(files.iter().map(String::as_str)).unwrap();
            assert_eq!(found, naming);
            assert_eq!(found.parameter(&files[0]), None);
            assert_eq!(found.parameter(&files[1]).unwrap(), head);
            assert_eq!(found.parameter(&files[2]).unwrap(), layer);
        }
        assert_eq!(Naming::of([other, head].into_iter()), None);
    }
}
