//! Reading what the scripts in `tests/fixtures` recorded, and comparing with it.

use serde_json::Value;

/// Where an array went: its last values, and the largest magnitude each element ever had, which is what rounding
/// errors on the way were relative to.
#[derive(Default)]
pub struct Path {
    pub last: Vec<f32>,
    largest: Vec<f32>,
}

impl Path {
    pub fn push(&mut self, values: &[f32]) {
        self.last = values.to_vec();
        self.largest.resize(values.len(), 0.0);
        self.largest.iter_mut().zip(values).for_each(|(largest, x)| *largest = largest.max(x.abs()));
    }

    pub fn close(&self, theirs: &[f32], name: &str) {
        self.within(1e-6, theirs, name);
    }

    pub fn within(&self, tolerance: f32, theirs: &[f32], name: &str) {
        assert_eq!(self.last.len(), theirs.len());
        for ((ours, theirs), largest) in self.last.iter().zip(theirs).zip(&self.largest) {
            let error = (ours - theirs).abs() / largest;
            assert!(error <= tolerance, "{name}: {ours} is not {theirs}, error {error:e}");
        }
    }
}

pub fn fixture(name: &str) -> Value {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}"))
}

pub fn array(value: &Value) -> &[Value] {
    value.as_array().expect("an array in the fixture")
}

pub fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number in the fixture")
}

/// Little-endian f32s as hexadecimal text.
pub fn floats(value: &Value) -> Vec<f32> {
    let hex = value.as_str().expect("hexadecimal text in the fixture");
    let word =
        |at: usize| u32::from_str_radix(&hex[at..at + 8], 16).expect("hexadecimal text in the fixture");
    (0..hex.len()).step_by(8).map(|at| f32::from_bits(word(at).swap_bytes())).collect()
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
