//! The identity of a run: what a resumed run must have in common with the one that wrote the state, as the state keeps it.

mod words;

use super::args::Dtype;
use crate::config::TrainConfig;
use crate::error::CliError;
use serde_json::{Map, Value, json};
use terrace_kernels::DType;
use terrace_models::ModelConfig;
use terrace_tiers::{BlobKind, StoreSpec, checksum};
use terrace_zero::{EngineError, identity_differences};

const CONFIG: &str = "the model's config.json";
const DTYPE: &str = "--dtype";
const STATE: &str = "--state";
const EXPERTS: &str = "experts of a layer";

/// Everything that the numbers of a run depend on, and the order in which its state has them.
pub fn of_run(
    run: &TrainConfig,
    (model, config_text): (&ModelConfig, &str),
    data: u64,
    steps: u64,
) -> String {
    let groups: Vec<String> = run.groups.iter().map(ToString::to_string).collect();
    let mut identity = json!({
        CONFIG: config_checksum(config_text),
        "the rows of --data": format!("checksum {data:016x}"),
        "--seq-len": run.seq_len,
        "--batch-size": run.batch_size,
        "--grad-accum": run.grad_accum,
        "--seed": run.seed,
        "shuffle": run.shuffle,
        DTYPE: run.dtype,
        STATE: run.state.name(),
        "--learning-rate": run.learning_rate,
        "optimizer": format!("{:?}", run.optimizer),
        "--clip": run.clip,
        "fp16": run.loss_scale.map(|scale| format!("{scale:?}")),
        "--param-group and --no-decay": groups,
        "--scheduler": format!("{:?}", run.schedule),
        "steps": run.schedule.depends_on_length().then_some(steps),
    });
    // States of other models are older than this entry.
    if let Some(order) = order_of_experts(model) {
        identity[EXPERTS] = order.into();
    }
    identity.to_string()
}

/// Says that they come before a layer's other parameters, as those do whose gradients are complete before the others.
fn order_of_experts(model: &ModelConfig) -> Option<String> {
    let stages = model.mixture.as_ref()?.stages(model.hidden).len();
    (stages > 1).then(|| format!("first, in {stages} stages"))
}

fn config_checksum(text: &str) -> String {
    format!("checksum {:016x}", checksum(text.as_bytes()))
}

/// An identity as it was found in a state. One that the command did not write has no entries.
#[derive(Debug)]
pub struct Identity {
    entries: Map<String, Value>,
    text: String,
}

impl Identity {
    /// The identity of a store.
    pub fn of(spec: &StoreSpec) -> Self {
        let entries = serde_json::from_str(&spec.identity).unwrap_or_default();
        Self { entries, text: spec.identity.clone() }
    }

    /// As a document: its entries, structures in words, or the text if it has none.
    pub fn document(&self) -> Value {
        if self.entries.is_empty() {
            return json!(self.text);
        }
        let in_words =
            |value: &Value| value.as_str().map_or_else(|| value.clone(), |text| words::of(text).into());
        Value::Object(self.entries.iter().map(|(name, value)| (name.clone(), in_words(value))).collect())
    }

    /// A line for every entry: name and value in words.
    pub fn lines(&self) -> Vec<(String, String)> {
        if self.entries.is_empty() && !self.text.trim().is_empty() {
            return vec![("identity".into(), self.text.clone())];
        }
        self.entries.iter().map(|(name, value)| (name.clone(), in_words(value))).collect()
    }

    /// The value of `--state`, if it is there.
    pub fn state(&self) -> Option<&str> {
        self.entries.get(STATE).and_then(Value::as_str)
    }

    /// The number type of the weights.
    ///
    /// # Errors
    /// Neither the identity nor the size of a weight says.
    pub fn dtype(&self, spec: &StoreSpec) -> Result<DType, CliError> {
        let named =
            self.entries.get(DTYPE).and_then(|value| serde_json::from_value::<Dtype>(value.clone()).ok());
        let weights = spec.kinds.iter().find(|kind| kind.kind == BlobKind::Weight);
        match (named, weights.map(|kind| kind.block_bytes)) {
            (Some(dtype), _) => Ok(super::session::dtype(dtype)),
            (None, Some(4)) => Ok(DType::F32),
            _ => Err(CliError::Failed(
                "the training state does not say which number type its weights have: `terrace finetune` did not make it; \
                 the library's `StoredWeights` can be told"
                    .into(),
            )),
        }
    }

    /// Compares the `config.json` of a model with the one that the state was trained with.
    ///
    /// # Errors
    /// They differ.
    pub fn check_config(&self, path: &std::path::Path, text: &str) -> Result<(), CliError> {
        let given = config_checksum(text);
        match self.entries.get(CONFIG).and_then(Value::as_str) {
            Some(stored) if stored != given => Err(CliError::Usage(format!(
                "the training state belongs to another model: its config.json had {stored}, and {} has {given}. Give the model \
                 folder that it was trained from, with its config.json as it was",
                path.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Compares the order of parameters with that which this build gives them.
    ///
    /// # Errors
    /// They differ.
    pub fn check_order(&self, model: &ModelConfig) -> Result<(), CliError> {
        let stored = self.entries.get(EXPERTS).and_then(Value::as_str);
        if self.entries.is_empty() || stored == order_of_experts(model).as_deref() {
            return Ok(());
        }
        Err(CliError::Failed(
            "the training state was written by another build of terrace, which gives the experts of a layer another order: export it \
             with that one"
                .into(),
        ))
    }
}

/// The error of a run that would resume another, with what differs as a user would say it.
pub fn another_run(stored: String, given: String) -> CliError {
    let words = |value: &Option<Value>| value.as_ref().map_or("nothing".into(), in_words);
    match identity_differences(&stored, &given) {
        // Not made by a command.
        None => EngineError::AnotherRun { stored, given }.into(),
        Some(parts) => {
            let parts = parts
                .iter()
                .map(|(key, [was, is])| format!("{key} was {} and is now {}", words(was), words(is)));
            CliError::Usage(format!(
                "the training state was made by another run: {}. Resume with the original settings, or choose another directory",
                parts.collect::<Vec<_>>().join("; ")
            ))
        }
    }
}

fn in_words(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(text) => words::of(text),
        Value::Array(values) if values.is_empty() => "none".into(),
        Value::Array(values) => values.iter().map(in_words).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of large experts alone it is another than it was.
    #[test]
    fn the_order_of_experts_is_that_of_the_state() {
        let config = |architecture: &str, hidden: usize| {
            let text = format!(
                r#"{{"architectures": ["{architecture}"], "vocab_size": 97, "hidden_size": {hidden}, "intermediate_size": {hidden},
                    "num_hidden_layers": 2, "num_attention_heads": 16}}"#
            );
            ModelConfig::parse(&text).unwrap()
        };
        let (small, large) = (config("MixtralForCausalLM", 64), config("MixtralForCausalLM", 8192));
        let state = |model: Option<&ModelConfig>| {
            let mut entries = Map::new();
            entries.insert(CONFIG.into(), "checksum 0".into());
            let order = model.and_then(order_of_experts);
            entries.extend(order.map(|order| (EXPERTS.to_owned(), order.into())));
            Identity { entries, text: String::new() }
        };
        assert!(order_of_experts(&large).is_some());
        for model in [&small, &config("LlamaForCausalLM", 4096)] {
            state(None).check_order(model).unwrap();
            assert!(state(Some(&large)).check_order(model).is_err());
        }
        state(Some(&large)).check_order(&large).unwrap();
        let error = state(None).check_order(&large).unwrap_err().to_string();
        assert!(error.contains("another build of terrace"), "{error}");
    }
}
