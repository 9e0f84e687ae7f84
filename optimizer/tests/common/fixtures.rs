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

    pub fn close(&self, theirs: &Recorded, name: &str) {
        self.within(1e-6, theirs, name);
    }

    pub fn within(&self, tolerance: f32, theirs: &Recorded, name: &str) {
        let ours = self.last.iter().zip(&self.largest).step_by(theirs.stride);
        assert_eq!(ours.len(), theirs.values.len(), "{name}");
        for ((ours, largest), theirs) in ours.zip(&theirs.values) {
            let error = (ours - theirs).abs() / largest;
            assert!(error <= tolerance, "{name}: {ours} is not {theirs}, error {error:e}");
        }
        if let Some(all) = &theirs.all {
            let (ours, largest) = (sum(&self.last), sum(&self.largest));
            let (theirs, error) = (all.sum, (ours - all.sum).abs() / largest);
            // Roundings cancel.
            let tolerance = f64::from(tolerance) / 20.0;
            assert!(error <= tolerance, "{name}: the sum {ours} is not {theirs}, error {error:e}");
        }
    }

    pub fn same_bits(&self, theirs: &Recorded, name: &str) {
        let ours: Vec<f32> = self.last.iter().copied().step_by(theirs.stride).collect();
        assert_eq!(bits(&ours), bits(&theirs.values), "{name}");
        if let Some(all) = &theirs.all {
            assert_eq!(checksum(&self.last), all.checksum, "{name}: an element between those recorded");
        }
    }
}

/// An array as it was recorded: every `stride`th value, and where that is not each, what says something of all.
pub struct Recorded {
    values: Vec<f32>,
    stride: usize,
    all: Option<All>,
}

struct All {
    sum: f64,
    checksum: u64,
}

impl Recorded {
    /// The array `name` of a case, if it has one.
    pub fn new(case: &Value, name: &str) -> Option<Self> {
        let values = floats(case.get(name)?);
        let Some(stride) = case.get("stride") else { return Some(Self { values, stride: 1, all: None }) };
        let checksum = case["checksums"][name].as_u64().expect("a checksum in the fixture");
        let all = Some(All { sum: number(&case["sums"][name]), checksum });
        Some(Self { values, stride: stride.as_u64().expect("a stride in the fixture") as usize, all })
    }
}

fn sum(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x)).sum()
}

/// The bits of each value times its place, counted from 1: `checksum` of `fixtures/make_fixtures.py`.
fn checksum(values: &[f32]) -> u64 {
    let terms = values.iter().zip(1u64..).map(|(x, place)| u64::from(x.to_bits()).wrapping_mul(place));
    terms.fold(0, u64::wrapping_add)
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
