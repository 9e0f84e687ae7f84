//! Fresh weights for a new model.

use crate::ModelConfig;
use std::f64::consts::TAU;
use terrace_zero::{ParamSpec, Result, WeightSource};

/// Draws weights the way transformers initializes a model: normal with the configured deviation, norms of scale 1, biases 0, layers
/// that are multiplied by 1.
///
/// Element i of a tensor depends on the seed, the tensor's name and i alone (a counter-based generator), so that any
/// split into ranges gives the same model.
#[derive(Debug, Clone)]
pub struct RandomSource {
    seed: u64,
    std: f64,
    /// The weights of norms.
    norm: f32,
}

impl RandomSource {
    /// Deviation 0.02.
    pub fn new(seed: u64) -> Self {
        Self { seed, std: 0.02, norm: 1.0 }
    }

    /// The deviation that the configuration names.
    pub fn for_config(config: &ModelConfig, seed: u64) -> Self {
        let norm = if config.norm_plus_one { 0.0 } else { 1.0 };
        Self { seed, std: f64::from(config.initializer_std), norm }
    }

    /// Elements `2 · pair` and the one after it of a weight with the stream `key`: a Box–Muller pair.
    fn normal(&self, key: u64, pair: usize) -> [f32; 2] {
        let counter = 2 * pair as u64;
        // 53 random bits, moved off zero so that the logarithm is finite.
        let radius = (-2.0 * (unit(key, counter) + f64::EPSILON / 4.0).ln()).sqrt();
        let angle = TAU * unit(key, counter + 1);
        [angle.cos(), angle.sin()].map(|turned| (self.std * radius * turned) as f32)
    }
}

impl WeightSource for RandomSource {
    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [f32]) -> Result {
        let is = |ends: &[&str]| ends.iter().any(|end| param.name.ends_with(end));
        if is(&["linear_attn.norm.weight", "router.scale", "per_expert_scale", "layer_scalar"]) {
            out.fill(1.0);
        } else if is(&["norm.weight", "layernorm_1.weight", "layernorm_2.weight"]) {
            out.fill(self.norm);
        } else if param.name.ends_with(".bias") {
            out.fill(0.0);
        } else {
            let key = mix(self.seed ^ hash(&param.name));
            // The second half of a pair whose first is in another range.
            let (odd, pairs) = out.split_at_mut((start % 2).min(out.len()));
            odd.iter_mut().for_each(|value| *value = self.normal(key, start / 2)[1]);
            for (pair, values) in pairs.chunks_mut(2).enumerate() {
                let drawn = self.normal(key, start.div_ceil(2) + pair);
                values.copy_from_slice(&drawn[..values.len()]);
            }
        }
        Ok(())
    }
}

/// Number `counter` of stream `key`, uniform in [0, 1).
fn unit(key: u64, counter: u64) -> f64 {
    let bits = mix(key.wrapping_add(counter.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// FNV-1a.
fn hash(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_agree_with_the_whole_and_moments_with_the_deviation() {
        let param = ParamSpec::new("model.layers.0.mlp.up_proj.weight", &[101, 100]);
        let mut source = RandomSource::new(7);
        let mut whole = vec![0.0; param.elements()];
        source.read(&param, 0, &mut whole).unwrap();
        for (start, end) in [(0, 1), (1, 2), (13, 4096), (4096, 10_100)] {
            let mut range = vec![0.0; end - start];
            source.read(&param, start, &mut range).unwrap();
            assert_eq!(range, whole[start..end]);
        }
        let mean = whole.iter().map(|x| f64::from(*x)).sum::<f64>() / whole.len() as f64;
        let variance = whole.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / whole.len() as f64;
        assert!(mean.abs() < 1e-3, "mean {mean}");
        assert!((variance.sqrt() - 0.02).abs() < 1e-3, "deviation {}", variance.sqrt());
    }

    #[test]
    fn names_and_seeds_give_different_streams() {
        let draw = |seed, name: &str| {
            let mut out = [0.0; 4];
            RandomSource::new(seed).read(&ParamSpec::new(name, &[4]), 0, &mut out).unwrap();
            out
        };
        assert_ne!(draw(1, "a.weight"), draw(1, "b.weight"));
        assert_ne!(draw(1, "a.weight"), draw(2, "a.weight"));
        assert_eq!(draw(1, "model.norm.weight"), [1.0; 4]);
        assert_eq!(draw(1, "q_proj.bias"), [0.0; 4]);
    }
}
