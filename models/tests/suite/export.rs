//! Writing folders: what was read comes back, and no half-written file has a final name.

use crate::fixture::{Fixture, weights_of};
use std::path::Path;
use terrace_kernels::DType;
use terrace_models::{Model, SafetensorsSource, export_folder, remove_weights};
use terrace_zero::{EngineError, ParamSpec, WeightReader, WeightSource};

/// Gives out what it reads, and fails at one parameter if asked to.
pub struct Copying {
    source: SafetensorsSource,
    params: Vec<ParamSpec>,
    dtype: DType,
    broken: Option<String>,
}

impl Copying {
    pub fn new(folder: &Path, dtype: DType) -> Self {
        let model = Model::from_folder(folder).unwrap();
        let params = model.blocks.iter().flat_map(|block| block.params().to_vec()).collect();
        Self { source: weights_of(folder), params, dtype, broken: None }
    }
}

impl WeightReader for Copying {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.params.clone()
    }

    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [u8]) -> terrace_zero::Result {
        if self.broken.as_ref() == Some(&param.name) {
            return Err(EngineError::Model("the state cannot be read".into()));
        }
        let mut values = vec![0.0; out.len() / self.dtype.size()];
        self.source.read(param, start, &mut values)?;
        for (bytes, value) in out.chunks_mut(self.dtype.size()).zip(values) {
            match self.dtype {
                DType::BF16 => bytes.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes()),
                _ => bytes.copy_from_slice(&value.to_le_bytes()),
            }
        }
        Ok(())
    }
}

#[test]
fn an_export_reads_back_whatever_the_shards() {
    for fixture in Fixture::all() {
        let out = tempfile::tempdir().unwrap();
        let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
        // Over each other: sharded, single, and sharded differently.
        for shard_bytes in [20_000, u64::MAX, 40_000] {
            let mut reader = Copying::new(&fixture.folder, DType::F32);
            export_folder(&mut reader, Some(&fixture.folder), out.path(), shard_bytes, &config).unwrap();
            assert_eq!(out.path().join("model.safetensors").exists(), shard_bytes == u64::MAX);
            let written = std::fs::read_to_string(out.path().join("config.json")).unwrap();
            let written: serde_json::Value = serde_json::from_str(&written).unwrap();
            assert_eq!(written["hidden_act"], fixture.json("config.json")["hidden_act"]);
            same_weights(&fixture.folder, out.path());
        }
        let names = names(out.path());
        let shards = names.iter().filter(|name| name.starts_with("model-")).count();
        let expected = format!("model-00001-of-{shards:05}.safetensors");
        assert!(shards > 1 && names.contains(&expected), "{names:?}");
        assert!(!names.iter().any(|name| name.contains("partial")), "{names:?}");
    }
}

#[test]
fn the_configuration_names_the_dtype_of_the_weights() {
    let fixture = Fixture::new("llama31");
    for (file, key) in [("config.json", "dtype"), ("config_old.json", "torch_dtype")] {
        let out = tempfile::tempdir().unwrap();
        let config = std::fs::read_to_string(fixture.folder.join(file)).unwrap();
        let mut reader = Copying::new(&fixture.folder, DType::BF16);
        export_folder(&mut reader, None, out.path(), u64::MAX, &config).unwrap();
        let text = std::fs::read_to_string(out.path().join("config.json")).unwrap();
        let written: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(written[key], "bfloat16");
        assert_eq!(
            Model::from_folder(out.path()).unwrap().config,
            Model::from_folder(&fixture.folder).unwrap().config
        );
        SafetensorsSource::open(out.path()).unwrap().validate(&reader.params()).unwrap();
    }
}

/// A configuration that Python wrote is written as transformers writes such numbers.
#[test]
fn numbers_that_json_does_not_have_are_kept() {
    let fixture = Fixture::new("llama2");
    let out = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let config = config.replacen('{', "\u{FEFF}{\"time_step_limit\": [0.0, Infinity],", 1);
    let mut reader = Copying::new(&fixture.folder, DType::F32);
    export_folder(&mut reader, None, out.path(), u64::MAX, &config).unwrap();
    let text = std::fs::read_to_string(out.path().join("config.json")).unwrap();
    let written: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(written["time_step_limit"], serde_json::json!([0.0, {"__float__": "Infinity"}]));
}

#[test]
fn whatever_the_tokenizer_is_made_of_is_copied() {
    let source = tempfile::tempdir().unwrap();
    let names =
        ["tekken.json", "tokenizer.model.v3", "additional_chat_templates/tool_use.jinja", "readme.jinja"];
    std::fs::create_dir(source.path().join("additional_chat_templates")).unwrap();
    for name in names.iter().chain(&["additional_chat_templates/notes.txt"]) {
        std::fs::write(source.path().join(name), name).unwrap();
    }
    let fixture = Fixture::new("qwen3");
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("out");
    let mut reader = Copying::new(&fixture.folder, DType::F32);
    // Again over itself, which keeps what is there.
    for from in [source.path(), &out] {
        export_folder(&mut reader, Some(from), &out, u64::MAX, &config).unwrap();
        for name in &names[..3] {
            assert_eq!(std::fs::read_to_string(out.join(name)).unwrap(), *name);
        }
        assert!(!out.join("readme.jinja").exists());
        let templates = std::fs::read_dir(out.join("additional_chat_templates")).unwrap();
        assert_eq!(templates.count(), 1);
    }
    let failed = root.path().join("failed");
    reader.broken = Some("model.norm.weight".into());
    export_folder(&mut reader, Some(source.path()), &failed, u64::MAX, &config).unwrap_err();
    assert!(!failed.exists());
}

/// Of another model nothing stays that a loader would take for this one's; what somebody put beside the same model does.
#[test]
fn what_came_with_another_model_goes() {
    let folder = |names: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, name).unwrap();
        }
        folder
    };
    let (mine, its) = ("additional_chat_templates/rag.jinja", "additional_chat_templates/tool_use.jinja");
    let earlier = folder(&["tokenizer.json", "chat_template.jinja", "generation_config.json", its]);
    let next = folder(&["tokenizer.json", mine]);
    let fixture = Fixture::new("qwen3");
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let other = config.replacen('{', "{\"_name_or_path\": \"another\",", 1);
    let mut reader = Copying::new(&fixture.folder, DType::F32);
    let out = tempfile::tempdir().unwrap();
    let mut export = |from: &tempfile::TempDir, config: &str| {
        export_folder(&mut reader, Some(from.path()), out.path(), u64::MAX, config).unwrap();
        let templates = out.path().join("additional_chat_templates");
        [names(out.path()), names(&templates)].concat()
    };
    export(&earlier, &config);
    std::fs::write(out.path().join("LICENSE"), "mine").unwrap();
    let whole = export(&next, &config);
    for name in ["LICENSE", "chat_template.jinja", "generation_config.json", "rag.jinja", "tool_use.jinja"] {
        assert!(whole.iter().any(|found| found == name), "{name} of {whole:?}");
    }
    let expected = [
        "LICENSE",
        "additional_chat_templates",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "rag.jinja",
    ];
    assert_eq!(export(&next, &other), expected);
}

#[test]
fn code_that_the_configuration_names_is_copied() {
    let source = tempfile::tempdir().unwrap();
    for name in ["modeling_mine.py", "helper.py", "notes.txt"] {
        std::fs::write(source.path().join(name), name).unwrap();
    }
    let fixture = Fixture::new("qwen3");
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let mut reader = Copying::new(&fixture.folder, DType::F32);
    let mut export = |auto_map: &str| {
        let config = config.replacen('{', &format!("{{\"auto_map\": {auto_map},"), 1);
        let out = tempfile::tempdir().unwrap();
        export_folder(&mut reader, Some(source.path()), out.path(), u64::MAX, &config).unwrap();
        names(out.path())
    };
    let whole = export(r#"{"AutoModelForCausalLM": "modeling_mine.Mine"}"#);
    assert_eq!(whole, ["config.json", "helper.py", "model.safetensors", "modeling_mine.py"]);
    let elsewhere = r#"{"AutoModelForCausalLM": "someone/model--modeling_mine.Mine"}"#;
    assert_eq!(export(elsewhere), ["config.json", "model.safetensors"]);
    let tokenizer = r#"{"auto_map": {"AutoTokenizer": ["tokenization_mine.Mine", null]}}"#;
    std::fs::write(source.path().join("tokenizer_config.json"), tokenizer).unwrap();
    assert!(export(elsewhere).contains(&"helper.py".to_owned()));
}

#[test]
fn a_failed_export_leaves_the_earlier_one() {
    let fixture = Fixture::new("qwen3");
    let out = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let mut reader = Copying::new(&fixture.folder, DType::F32);
    export_folder(&mut reader, Some(&fixture.folder), out.path(), 40_000, &config).unwrap();
    let before = names(out.path());
    reader.broken = Some("model.norm.weight".into());
    let error = export_folder(&mut reader, None, out.path(), 20_000, &config).unwrap_err();
    assert!(error.to_string().contains("cannot be read"));
    assert_eq!(names(out.path()), before);
    same_weights(&fixture.folder, out.path());
}

#[test]
fn a_failed_export_leaves_no_folder_of_its_own() {
    let fixture = Fixture::new("qwen3");
    let root = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let mut reader = Copying::new(&fixture.folder, DType::F32);
    reader.broken = Some("model.norm.weight".into());
    let out = root.path().join("checkpoint-1");
    export_folder(&mut reader, None, &out, u64::MAX, &config).unwrap_err();
    assert!(!out.exists());
    std::fs::create_dir(&out).unwrap();
    export_folder(&mut reader, None, &out, u64::MAX, &config).unwrap_err();
    assert!(out.is_dir(), "one that was there stays");
}

/// It ends between two of the names: what is found is refused, and not old weights with a new tokenizer.
#[test]
fn an_export_that_is_cut_off_over_another_leaves_no_model() {
    let source = tempfile::tempdir().unwrap();
    std::fs::write(source.path().join("tokenizer.json"), "{}").unwrap();
    let fixture = Fixture::new("qwen3");
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    for (before, after) in [(u64::MAX, u64::MAX), (u64::MAX, 40_000), (40_000, u64::MAX)] {
        let out = tempfile::tempdir().unwrap();
        let mut reader = Copying::new(&fixture.folder, DType::F32);
        export_folder(&mut reader, None, out.path(), before, &config).unwrap();
        // A folder cannot be replaced by a file.
        std::fs::create_dir(out.path().join("tokenizer.json")).unwrap();
        export_folder(&mut reader, Some(source.path()), out.path(), after, &config).unwrap_err();
        let left = names(out.path());
        assert!(
            !left.iter().any(|name| name.ends_with(".safetensors") || name.contains("index")),
            "{left:?}"
        );
        std::fs::remove_dir(out.path().join("tokenizer.json")).unwrap();
        // What a process that ended leaves under temporary names goes with the next export, or with all weights.
        for name in [".model-00001-of-00009.safetensors.partial", ".model.safetensors.index.json.partial"] {
            std::fs::write(out.path().join(name), "half").unwrap();
        }
        export_folder(&mut reader, Some(source.path()), out.path(), after, &config).unwrap();
        assert!(!names(out.path()).iter().any(|name| name.contains("partial")), "{:?}", names(out.path()));
        same_weights(&fixture.folder, out.path());
        remove_weights(out.path()).unwrap();
        assert_eq!(names(out.path()), ["config.json", "tokenizer.json"]);
    }
}

#[test]
fn tokenizers_travel_along() {
    let source = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "generation_config.json", "chat_template.jinja", "notes.txt"] {
        std::fs::write(source.path().join(name), name).unwrap();
    }
    let fixture = Fixture::new("llama2");
    let out = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(fixture.folder.join("config.json")).unwrap();
    let mut reader = Copying::new(&fixture.folder, DType::F32);
    export_folder(&mut reader, Some(source.path()), out.path(), u64::MAX, &config).unwrap();
    let expected = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ];
    assert_eq!(names(out.path()), expected);
    assert_eq!(std::fs::read_to_string(out.path().join("tokenizer.json")).unwrap(), "tokenizer.json");
}

fn same_weights(expected: &Path, found: &Path) {
    let params = Copying::new(expected, DType::F32).params;
    let (mut expected, mut found) = (weights_of(expected), weights_of(found));
    for param in params {
        let (mut a, mut b) = (vec![0.0; param.elements()], vec![1.0; param.elements()]);
        expected.read(&param, 0, &mut a).unwrap();
        found.read(&param, 0, &mut b).unwrap();
        assert_eq!(a, b, "{}", param.name);
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
