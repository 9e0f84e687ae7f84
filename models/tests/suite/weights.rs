//! Reading weights: ranges, element types, layouts, and every kind of damage.

use crate::fixture::Fixture;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use std::collections::HashMap;
use std::path::Path;
use terrace_models::{Model, ModelConfig, SafetensorsSource};
use terrace_zero::{ParamSpec, WeightSource};

#[test]
fn every_fixture_validates_and_ranges_agree() {
    for fixture in Fixture::all() {
        let model = Model::from_folder(&fixture.folder).unwrap();
        let mut source = SafetensorsSource::for_model(&fixture.folder, &model).unwrap();
        assert!(source.unused(&model).is_empty(), "{:?}", source.unused(&model));
        for block in &model.blocks {
            source.validate(block.params()).unwrap();
            for param in block.params() {
                let mut whole = vec![f32::NAN; param.elements()];
                source.read(param, 0, &mut whole).unwrap();
                assert!(whole.iter().all(|v| v.is_finite()));
                let (start, end) = (param.elements() / 3, param.elements() - 1);
                let mut range = vec![f32::NAN; end - start];
                source.read(param, start, &mut range).unwrap();
                assert_eq!(range, whole[start..end]);
            }
        }
    }
}

#[test]
fn half_precision_widens_exactly() {
    let values = [1.0f32, -0.5, 3.140625, 65504.0];
    let bf16: Vec<u8> = values.iter().flat_map(|v| half::bf16::from_f32(*v).to_le_bytes()).collect();
    let f16: Vec<u8> = values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect();
    let folder = tempfile::tempdir().unwrap();
    let tensors = [("model.a", Dtype::BF16, &bf16), ("b", Dtype::F16, &f16)];
    write(&folder.path().join("model.safetensors"), &tensors);
    let mut source = SafetensorsSource::open(folder.path()).unwrap();
    let mut out = [0.0; 4];
    source.read(&ParamSpec::new("model.a", &[4]), 0, &mut out).unwrap();
    assert_eq!(out, values.map(|v| half::bf16::from_f32(v).to_f32()));
    // The base model's name of a parameter is found too.
    source.read(&ParamSpec::new("model.b", &[4]), 0, &mut out).unwrap();
    assert_eq!(out, values);
}

/// Writes a folder's weights with `others` in place of the tensor `name`.
fn write_instead<'a>(
    folder: &Path,
    stored: &safetensors::SafeTensors<'a>,
    name: &str,
    others: impl IntoIterator<Item = (String, TensorView<'a>)>,
) {
    let rest = stored.tensors().into_iter().filter(|(found, _)| found != name);
    safetensors::serialize_to_file(rest.chain(others), None, &folder.join("model.safetensors")).unwrap();
}

/// Phi 3 as transformers saves it, with its projections by themselves, and what of them is missing or has other rows.
#[test]
fn fused_projections_are_taken_apart() {
    const FUSED: &str = "model.layers.1.self_attn.qkv_proj.weight";
    let fixture = Fixture::new("phi3");
    let model = Model::from_folder(&fixture.folder).unwrap();
    let bytes = std::fs::read(fixture.folder.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let fused = stored.tensor(FUSED).unwrap();
    let rows = fused.shape()[0];
    let row_bytes = fused.data().len() / rows;
    let of_rows = |start: usize, end: usize| {
        let data = &fused.data()[start * row_bytes..end * row_bytes];
        TensorView::new(Dtype::F32, vec![end - start, fused.shape()[1]], data).unwrap()
    };
    let folder = tempfile::tempdir().unwrap();
    let with = |others: Vec<(String, TensorView<'_>)>| {
        write_instead(folder.path(), &stored, FUSED, others);
        SafetensorsSource::for_model(folder.path(), &model)
    };
    let part = |name: &str| format!("model.layers.1.self_attn.{name}_proj.weight");
    let (q, kv) = (model.config.query_width(1), model.config.kv_width(1));
    let parts =
        vec![(part("q"), of_rows(0, q)), (part("k"), of_rows(q, q + kv)), (part("v"), of_rows(q + kv, rows))];
    let mut apart = with(parts).unwrap();
    let mut whole = fixture.weights();
    for param in model.blocks.iter().flat_map(|block| block.params()) {
        let (mut a, mut b) = (vec![0.0; param.elements()], vec![1.0; param.elements()]);
        apart.read(param, 0, &mut a).unwrap();
        whole.read(param, 0, &mut b).unwrap();
        assert_eq!(a, b, "{}", param.name);
    }
    let missing = with(Vec::new()).unwrap_err().to_string();
    assert!(missing.contains(FUSED) && missing.contains("[64, 32]"), "{missing}");
    let short = with(vec![(FUSED.into(), of_rows(0, rows - 1))]).unwrap_err().to_string();
    assert!(short.contains(FUSED) && short.contains("[63, 32]"), "{short}");
}

/// A model that is tied has its embedding for a head, whichever of the two names the files have.
#[test]
fn a_tied_head_is_the_embedding_or_refused() {
    const EMBEDDING: &str = "model.embed_tokens.weight";
    let fixture = Fixture::new("llama31");
    let config = ModelConfig::from_folder(&fixture.folder).unwrap();
    let bytes = std::fs::read(fixture.folder.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let (embedding, other) =
        (stored.tensor(EMBEDDING).unwrap(), vec![0x3f; 4 * config.vocab * config.hidden]);
    let head = TensorView::new(Dtype::F32, embedding.shape().to_vec(), &other).unwrap();
    let folder = tempfile::tempdir().unwrap();
    const HEAD: &str = "lm_head.weight";
    // The model with other tensors in place of its embedding.
    let validate = |tied, others: &[(&str, &TensorView<'_>)]| {
        let others = others.iter().map(|(name, tensor)| ((*name).to_owned(), (*tensor).clone()));
        write_instead(folder.path(), &stored, EMBEDDING, others);
        let mut source = SafetensorsSource::open(folder.path()).unwrap();
        let checked = source.validate_model(&Model::new(ModelConfig { tied, ..config.clone() }));
        checked.map(|()| source).map_err(|error| error.to_string())
    };
    let unused = |tied, source: &SafetensorsSource| -> Vec<String> {
        let model = Model::new(ModelConfig { tied, ..config.clone() });
        source.unused(&model)
    };
    assert!(unused(true, &validate(true, &[(EMBEDDING, &embedding)]).unwrap()).is_empty());
    let more = [(EMBEDDING, &embedding), (HEAD, &embedding), ("more.b", &head), ("more.a", &head)];
    assert_eq!(unused(true, &validate(true, &more).unwrap()), ["more.a", "more.b"]);
    let frequencies = [(EMBEDDING, &embedding), ("model.layers.0.self_attn.rotary_emb.inv_freq", &head)];
    assert!(unused(true, &validate(true, &frequencies).unwrap()).is_empty());
    validate(true, &[(EMBEDDING, &embedding), (HEAD, &embedding)]).unwrap();
    let param = ParamSpec::new(EMBEDDING, embedding.shape());
    let [mut found, mut expected] = [vec![0.0; 100], vec![0.0; 100]];
    validate(true, &[(HEAD, &embedding)]).unwrap().read(&param, 60, &mut found).unwrap();
    SafetensorsSource::open(&fixture.folder).unwrap().read(&param, 60, &mut expected).unwrap();
    assert_eq!(found, expected);
    let missing = validate(false, &[(HEAD, &embedding)]).unwrap_err();
    assert!(missing.contains("no tensor `model.embed_tokens.weight`"), "{missing}");
    let message = validate(true, &[(EMBEDDING, &embedding), (HEAD, &head)]).unwrap_err();
    assert!(message.contains("model.safetensors differs from the embedding"), "{message}");
    assert!(message.contains("tie_word_embeddings to false"), "{message}");
    validate(false, &[(EMBEDDING, &embedding), (HEAD, &head)]).unwrap();
}

#[test]
fn damage_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    write(&path, &[("a", Dtype::F32, &vec![0; 16]), ("b", Dtype::I32, &vec![0; 16])]);
    let good = std::fs::read(&path).unwrap();
    let source = SafetensorsSource::open(folder.path()).unwrap();

    let message =
        |name, dims: &[usize]| source.validate(&[ParamSpec::new(name, dims)]).unwrap_err().to_string();
    let shape = message("a", &[2, 2]);
    for part in ["`a`", "model.safetensors", "[4]", "[2, 2]"] {
        assert!(shape.contains(part), "{shape}");
    }
    assert!(message("c", &[4]).contains("no tensor `c` (expected shape [4])"));
    assert!(message("b", &[4]).contains("stored as I32"));

    let reopened = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        SafetensorsSource::open(folder.path()).unwrap_err().to_string()
    };
    let truncated = reopened(&good[..good.len() - 1]);
    let sizes = format!("describes {} bytes, the file has {}", good.len(), good.len() - 1);
    assert!(truncated.contains(&sizes), "{truncated}");
    assert!(reopened(&good[..20]).contains("truncated"));
    assert!(reopened(&good[..5]).contains("only 5 bytes"));
    let mut huge = good.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(reopened(&huge).contains("header claims"));
    let mut garbled = good.clone();
    garbled[9] = b'!';
    assert!(reopened(&garbled).contains("its header"));
    let text = r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,12]}}"#;
    let mut wrong = (text.len() as u64).to_le_bytes().to_vec();
    wrong.extend(text.bytes().chain([0; 16]));
    assert!(reopened(&wrong).contains("invalid shape, data type, or offset"));
    let longer = [&good[..], &[0; 3]].concat();
    assert!(reopened(&longer).contains("3 bytes more"));
}

#[test]
fn incomplete_folders_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let message = || SafetensorsSource::open(folder.path()).unwrap_err().to_string();
    assert!(message().contains("no model.safetensors or model.safetensors.index.json"));
    std::fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    assert!(message().contains("convert them to safetensors"));

    let index = folder.path().join("model.safetensors.index.json");
    let map = |file: &str| format!(r#"{{"weight_map": {{"a": "{file}"}}}}"#);
    std::fs::write(&index, map("model-00001-of-00002.safetensors")).unwrap();
    let missing = message();
    assert!(missing.contains("no model-00001-of-00002.safetensors, which"), "{missing}");
    std::fs::write(&index, map("../other.safetensors")).unwrap();
    assert!(message().contains("not a plain file name"));
    std::fs::write(&index, "{}").unwrap();
    assert!(message().contains("no weight_map"));
    std::fs::remove_file(&index).unwrap();

    write(&folder.path().join("x.safetensors"), &[("a", Dtype::F32, &vec![0; 16])]);
    SafetensorsSource::open(folder.path()).expect("a folder's only file needs no index");
    SafetensorsSource::open(&folder.path().join("x.safetensors")).expect("nor does a path to a file");
    write(&folder.path().join("y.safetensors"), &[("b", Dtype::F32, &vec![0; 16])]);
    assert!(message().contains("belong together"));
}

/// A file of vectors.
fn write(path: &Path, tensors: &[(&str, Dtype, &Vec<u8>)]) {
    let views: HashMap<&str, TensorView<'_>> = tensors
        .iter()
        .map(|(name, dtype, bytes)| {
            let elements = bytes.len() * 8 / dtype.bitsize();
            (*name, TensorView::new(*dtype, vec![elements], bytes).unwrap())
        })
        .collect();
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}
