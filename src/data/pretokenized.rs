//! Rows that are tokens already, and the masks that other trainers write beside them.
//!
//! `attention_mask` says what is padding: that is cut off, because a sample is padded when it is put into a batch. The masks of
//! [`LOSS_MASKS`] say which tokens are learnt; where there are `labels` or several masks, a token must be wanted by all of them.

use super::encode::kind;
use super::{IGNORED, Sample};
use serde_json::{Map, Value};

/// Keys whose zeros take the loss from a token: what TRL writes, and what tokenizers of transformers give.
pub(super) const LOSS_MASKS: [&str; 3] = ["completion_mask", "assistant_masks", "assistant_mask"];

type Result<T> = std::result::Result<T, String>;

/// Whether the row itself says which of its tokens carry loss, so that all of them may be left out.
pub(super) fn says_what_is_learnt(row: &Map<String, Value>) -> bool {
    row.contains_key("labels") || LOSS_MASKS.iter().any(|key| row.contains_key(*key))
}

/// The ids of a row and their labels, by default every id.
pub(super) fn sample(row: &Map<String, Value>) -> Result<Sample> {
    let ids: Vec<u32> = integers(&row["input_ids"], "input_ids")?;
    if ids.is_empty() {
        return Err("\"input_ids\" is empty".into());
    }
    let mut sample = Sample::all(ids);
    let count = sample.ids.len();
    if let Some(labels) = row.get("labels") {
        sample.labels = integers(labels, "labels")?;
        if sample.labels.len() != count {
            let labels = sample.labels.len();
            return Err(format!("{labels} labels for {count} input_ids; there must be one each"));
        }
    }
    for key in LOSS_MASKS {
        for (label, learnt) in sample.labels.iter_mut().zip(mask(row, key, count)?.into_iter().flatten()) {
            if !learnt {
                *label = IGNORED;
            }
        }
    }
    if let Some(is_token) = mask(row, "attention_mask", count)? {
        cut_padding(&mut sample, &is_token)?;
    }
    Ok(sample)
}

fn cut_padding(sample: &mut Sample, is_token: &[bool]) -> Result<()> {
    let (Some(start), Some(last)) = (is_token.iter().position(|&is| is), is_token.iter().rposition(|&is| is))
    else {
        return Err("\"attention_mask\" is 0 everywhere: the row has no tokens".into());
    };
    if let Some(gap) = is_token[start..=last].iter().position(|&is| !is) {
        return Err(format!(
            "\"attention_mask\"[{}] is 0 between tokens where it is 1; zeros may only be at the beginning and at the end, as \
             padding: give what is before and what is after a row each, or take the tokens out",
            start + gap
        ));
    }
    sample.ids = sample.ids[start..=last].to_vec();
    sample.labels = sample.labels[start..=last].to_vec();
    Ok(())
}

/// Zeros and ones, one for each of `count` tokens; `None` if the row has no such key.
fn mask(row: &Map<String, Value>, key: &str, count: usize) -> Result<Option<Vec<bool>>> {
    let Some(value) = row.get(key) else { return Ok(None) };
    let items = array(value, key)?;
    if items.len() != count {
        let values = items.len();
        return Err(format!("{values} values of \"{key}\" for {count} input_ids; there must be one each"));
    }
    let convert = |(at, item): (usize, &Value)| match (item.as_bool(), item.as_u64()) {
        (Some(flag), _) => Ok(flag),
        (None, Some(number @ (0 | 1))) => Ok(number == 1),
        _ => Err(format!("\"{key}\"[{at}]: expected 0 or 1, found {item}")),
    };
    items.iter().enumerate().map(convert).collect::<Result<_>>().map(Some)
}

fn integers<T: TryFrom<i64>>(value: &Value, key: &str) -> Result<Vec<T>> {
    let convert = |(at, item): (usize, &Value)| {
        let number = item.as_i64().and_then(|number| T::try_from(number).ok());
        number.ok_or_else(|| format!("\"{key}\"[{at}]: expected a token id, found {item}"))
    };
    array(value, key)?.iter().enumerate().map(convert).collect()
}

fn array<'a>(value: &'a Value, key: &str) -> Result<&'a Vec<Value>> {
    value.as_array().ok_or_else(|| format!("\"{key}\": expected an array of integers, found {}", kind(value)))
}
