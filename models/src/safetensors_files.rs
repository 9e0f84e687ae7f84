//! The files of a model folder that hold weights, and their headers.

use crate::{ModelError, Result};
use safetensors::tensor::Metadata;
use serde_json::Value;
use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Largest header that is read; safetensors itself allows no more.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Position of the first data byte, and the header. Parsing checks that tensors follow one another without a gap and
/// occupy what their shapes and types need; here they are checked against the length of the file.
pub(crate) fn read_header(file: &File, path: &Path) -> Result<(u64, Metadata)> {
    let corrupt = |detail: String| ModelError::Corrupt { path: path.to_owned(), detail };
    let found = file.metadata().map_err(ModelError::file("reading", path))?.len();
    if found < 8 {
        return Err(corrupt(format!("it has only {found} bytes")));
    }
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0).map_err(ModelError::file("reading", path))?;
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > HEADER_BYTES_MAX {
        return Err(corrupt(format!("its header claims {header_bytes} bytes")));
    }
    let truncated = |expected| Err(ModelError::Truncated { path: path.to_owned(), expected, found });
    let data_start = 8 + header_bytes;
    if data_start > found {
        return truncated(data_start);
    }
    let mut header = vec![0; header_bytes as usize];
    file.read_exact_at(&mut header, 8).map_err(ModelError::file("reading", path))?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|e| corrupt(format!("its header: {e}")))?;
    let expected = data_start.saturating_add(metadata.data_len() as u64);
    match found.cmp(&expected) {
        Ordering::Less => truncated(expected),
        Ordering::Equal => Ok((data_start, metadata)),
        Ordering::Greater => {
            let surplus = found - expected;
            Err(corrupt(format!("it has {surplus} bytes more than the {expected} its header describes")))
        }
    }
}

/// The files that hold a folder's weights.
pub(crate) fn weight_files(folder: &Path) -> Result<Vec<PathBuf>> {
    if folder.is_file() {
        return Ok(vec![folder.to_owned()]);
    }
    let single = folder.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let index = folder.join("model.safetensors.index.json");
    if index.is_file() {
        return shards_of(folder, &index);
    }
    let entries = std::fs::read_dir(folder).map_err(ModelError::file("reading", folder))?;
    let names: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    let with_extension = |extension: &str| -> Vec<PathBuf> {
        names.iter().filter(|path| path.extension().is_some_and(|e| e == extension)).cloned().collect()
    };
    let found = with_extension("safetensors");
    match found.len() {
        1 => Ok(found),
        0 => Err(ModelError::NoWeights {
            folder: folder.to_owned(),
            expected: "model.safetensors or model.safetensors.index.json".into(),
            hint: if with_extension("bin").is_empty() {
                ""
            } else {
                "; pickled .bin weights are not read: convert them to safetensors"
            },
        }),
        _ => Err(ModelError::NoWeights {
            folder: folder.to_owned(),
            expected: "model.safetensors.index.json".into(),
            hint: " to say how its several .safetensors files belong together",
        }),
    }
}

/// The files that an index names, each once.
fn shards_of(folder: &Path, index: &Path) -> Result<Vec<PathBuf>> {
    let corrupt = |detail: String| ModelError::Corrupt { path: index.to_owned(), detail };
    let text = std::fs::read_to_string(index).map_err(ModelError::file("reading", index))?;
    let value: Value = serde_json::from_str(&text).map_err(|e| corrupt(e.to_string()))?;
    let map = value
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| corrupt("it has no weight_map".into()))?;
    let mut names = BTreeSet::new();
    for (tensor, file) in map {
        let name =
            file.as_str().ok_or_else(|| corrupt(format!("weight_map of `{tensor}` is not a string")))?;
        if Path::new(name).file_name().is_none_or(|plain| plain != name) {
            return Err(corrupt(format!(
                "weight_map of `{tensor}` names {name:?}, which is not a plain file name"
            )));
        }
        names.insert(name);
    }
    if names.is_empty() {
        return Err(corrupt("its weight_map is empty".into()));
    }
    names
        .into_iter()
        .map(|name| {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(path);
            }
            Err(ModelError::NoWeights {
                folder: folder.to_owned(),
                expected: name.to_owned(),
                hint: ", which model.safetensors.index.json names; the download is incomplete",
            })
        })
        .collect()
}
