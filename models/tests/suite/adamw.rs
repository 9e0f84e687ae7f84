//! torch's AdamW and gradient clipping in f64, one tensor at a time.

/// The settings of the fixtures.
const LR: f64 = 1e-3;
const BETAS: (f64, f64) = (0.9, 0.95);
const EPS: f64 = 1e-8;
const DECAY: f64 = 0.1;
const CLIP: f64 = 1.0;

/// One parameter's state.
pub struct State {
    pub master: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
}

impl State {
    pub fn new(values: &[f32]) -> Self {
        let zeros = vec![0.0; values.len()];
        Self { master: values.iter().map(|v| f64::from(*v)).collect(), first: zeros.clone(), second: zeros }
    }

    /// Step `step` (from 1) with gradients already clipped by `factor`.
    pub fn step(&mut self, gradient: &[f32], factor: f64, step: i32) {
        let corrections = (1.0 - BETAS.0.powi(step), 1.0 - BETAS.1.powi(step));
        for (i, gradient) in gradient.iter().enumerate() {
            let gradient = f64::from(*gradient) * factor;
            self.first[i] = BETAS.0 * self.first[i] + (1.0 - BETAS.0) * gradient;
            self.second[i] = BETAS.1 * self.second[i] + (1.0 - BETAS.1) * gradient * gradient;
            let denominator = (self.second[i] / corrections.1).sqrt() + EPS;
            self.master[i] *= 1.0 - LR * DECAY;
            self.master[i] -= LR * self.first[i] / corrections.0 / denominator;
        }
    }
}

pub fn norm<'a>(gradients: impl Iterator<Item = &'a Vec<f32>>) -> f64 {
    gradients.flatten().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt()
}

/// The factor of `torch.nn.utils.clip_grad_norm_`.
pub fn clip_factor(norm: f64) -> f64 {
    (CLIP / (norm + 1e-6)).min(1.0)
}
