//! Every algorithm as its paper writes it, in f64 throughout. It shares no code with the loops.

use terrace_optimizer::{Adagrad, Adam, AdamW, Algorithm, Lion, Sgd, StateKind, StepArgs};

use super::{State, moments};

/// Weights and moments; a moment that the algorithm does not keep is not looked at.
#[derive(Clone, Debug)]
pub struct Reference {
    pub p: Vec<f64>,
    pub m: Vec<f64>,
    pub v: Vec<f64>,
}

impl Reference {
    pub fn new(weights: &[f32]) -> Self {
        let zeros = vec![0.0; weights.len()];
        Self { p: weights.iter().map(|w| f64::from(*w)).collect(), m: zeros.clone(), v: zeros }
    }

    /// What `algorithm` stored.
    pub fn of(algorithm: &Algorithm, state: &State) -> Self {
        let mut stored = Self::new(&state.master());
        for kind in moments(algorithm) {
            *stored.moment_mut(*kind) = state.moment(*kind);
        }
        stored
    }

    pub fn moment(&self, kind: StateKind) -> &[f64] {
        if kind == StateKind::Moment1 { &self.m } else { &self.v }
    }

    fn moment_mut(&mut self, kind: StateKind) -> &mut Vec<f64> {
        if kind == StateKind::Moment1 { &mut self.m } else { &mut self.v }
    }

    pub fn update(&mut self, algorithm: impl Into<Algorithm>, args: &StepArgs, gradient: &[f32]) {
        let algorithm = algorithm.into();
        for (((p, m), v), g) in self.p.iter_mut().zip(&mut self.m).zip(&mut self.v).zip(gradient) {
            one(&algorithm, args, [p, m, v], f64::from(*g) * f64::from(args.grad_scale));
        }
    }
}

fn one(algorithm: &Algorithm, args: &StepArgs, [p, m, v]: [&mut f64; 3], g: f64) {
    let (t, lr, decay) = (args.step as f64, args.lr, args.weight_decay);
    // Decay is a part of the gradient, or of the weight alone.
    let regularised = g + decay * *p;
    let decayed = *p - lr * decay * *p;
    let mut adam = |g: f64, p: f64, beta1: f64, beta2: f64, eps: f64| {
        *m = beta1 * *m + (1.0 - beta1) * g;
        *v = beta2 * *v + (1.0 - beta2) * g * g;
        let (m, v) = (*m / (1.0 - beta1.powf(t)), *v / (1.0 - beta2.powf(t)));
        p - lr * m / (v.sqrt() + eps)
    };
    *p = match *algorithm {
        Algorithm::AdamW(AdamW { beta1, beta2, eps, .. }) => adam(g, decayed, beta1, beta2, eps),
        Algorithm::Adam(Adam { beta1, beta2, eps, .. }) => adam(regularised, *p, beta1, beta2, eps),
        Algorithm::Adagrad(Adagrad { eps, lr_decay, .. }) => {
            *v += regularised * regularised;
            *p - lr / (1.0 + (t - 1.0) * lr_decay) * regularised / (v.sqrt() + eps)
        }
        Algorithm::Lion(Lion { beta1, beta2, .. }) => {
            let direction = beta1 * *m + (1.0 - beta1) * g;
            *m = beta2 * *m + (1.0 - beta2) * g;
            if direction == 0.0 { decayed } else { decayed - lr * direction.signum() }
        }
        Algorithm::Sgd(Sgd { momentum, nesterov, .. }) => {
            *m = momentum * *m + regularised;
            *p - lr * if nesterov { regularised + momentum * *m } else { *m }
        }
        ref other => panic!("there is no formula for {other}"),
    };
}
