//! Numbers of the files by which experts are chosen, and which are neither trained nor lost.

use crate::composite::{Tensors, tensors};
use crate::export::Copying;
use crate::fixture::Fixture;
use crate::gpt_oss;
use safetensors::Dtype;
use std::path::Path;
use terrace_kernels::DType;
use terrace_models::{Model, ModelConfig, RandomSource, Row, SafetensorsSource, TokenBatch, export_folder};

const BIASES: &str = "model.layers.1.mlp.gate.e_score_correction_bias";

fn fixture() -> Fixture {
    Fixture::new("glm4_moe")
}

/// The fixture with other tensors.
fn with(tensors: &Tensors) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(fixture().folder.join("config.json"), folder.path().join("config.json")).unwrap();
    gpt_oss::write(folder.path(), tensors);
    folder
}

fn export(source_dir: Option<&Path>, out: &Path) -> Result<(), String> {
    let config = std::fs::read_to_string(fixture().folder.join("config.json")).unwrap();
    let mut reader = Copying::new(&fixture().folder, DType::BF16);
    export_folder(&mut reader, source_dir, out, 30_000, &config).map_err(|error| error.to_string())
}

#[test]
fn exports_have_them_as_they_were() {
    let (before, out) = (tensors(&fixture().folder), tempfile::tempdir().unwrap());
    // Over itself, too.
    for source in [&fixture().folder, out.path()] {
        export(Some(source), out.path()).unwrap();
        let after = tensors(out.path());
        assert!(before.keys().eq(after.keys()));
        assert!(after[BIASES] == before[BIASES] && after[BIASES].0 == Dtype::F32);
        assert!(after.iter().all(|(name, (dtype, ..))| name == BIASES || *dtype == Dtype::BF16));
    }
    let error = export(None, out.path()).unwrap_err();
    assert!(error.contains("the folder it came from"), "{error}");
}

#[test]
fn a_folder_without_them_is_refused() {
    let mut all = tensors(&fixture().folder);
    all.remove(BIASES);
    let folder = with(&all);
    let model = Model::from_folder(folder.path()).unwrap();
    let opened = SafetensorsSource::for_model(folder.path(), &model);
    let batches = TokenBatch::for_model(folder.path(), &model.config);
    let exported = export(Some(folder.path()), &folder.path().join("out")).unwrap_err();
    for error in [opened.unwrap_err().to_string(), batches.unwrap_err().to_string(), exported] {
        assert!(error.contains(BIASES), "{error}");
    }
    assert!(!folder.path().join("out").exists());
}

/// Another type of the same numbers is as good, and a batch made without them is none.
#[test]
fn batches_bring_them() {
    let row = Row { ids: &[3, 4], labels: &[3, 4] };
    let config = ModelConfig::from_folder(&fixture().folder).unwrap();
    let error = TokenBatch::new(&config).train(&[row], 1, 2).unwrap_err().to_string();
    assert!(error.contains("TokenBatch::for_model"), "{error}");
    let mut all = tensors(&fixture().folder);
    let (_, shape, bytes) = all[BIASES].clone();
    let numbers = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    // They are such that a bf16 holds them.
    let narrow = numbers.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect();
    all.insert(BIASES.into(), (Dtype::BF16, shape, narrow));
    let folder = with(&all);
    let of = |batches: TokenBatch| batches.train(&[row], 1, 2).unwrap().inputs.pop().unwrap();
    let expected = of(TokenBatch::for_model(&fixture().folder, &config).unwrap());
    assert_eq!((expected.dims.as_slice(), &expected.bytes), (&[1, 6][..], &bytes));
    assert_eq!(of(TokenBatch::for_model(folder.path(), &config).unwrap()).bytes, bytes);
    let random = TokenBatch::for_source(&config, &mut RandomSource::new(1)).unwrap();
    assert_eq!(of(random).dims, expected.dims);
}
