//! The choice of an algorithm, and the loops of those that are one formula per parameter.
//!
//! An algorithm is a configuration ([`Elementwise`]) that makes one inlined function over f32 values ([`Rule`]), whose
//! scalars are computed once per step in f64 and rounded to f32. How masters and moments are stored is the business of
//! [`store`](crate::store) alone, so every algorithm has the same bits in every lossless format.
//!
//! # What is not here
//!
//! Muon orthogonalises the momentum of a whole weight matrix. Updates here are element-wise on chunks that begin and
//! end anywhere in a matrix, which is what lets state stream through memory smaller than a matrix; Muon is refused by
//! name. LAMB needs a norm per tensor between its moments and its weights and is absent for the same reason.

mod adagrad;
mod adam;
mod adamw;
mod lion;
mod loops;
mod sgd;

use std::fmt;
use std::str::FromStr;

pub use adagrad::Adagrad;
pub use adam::Adam;
pub use adamw::{AdamW, adamw, adamw_on};
pub use lion::Lion;
pub use sgd::Sgd;

use crate::error::{OptimizerError, Result};
use crate::isa::Isa;
use crate::layout::{Moments, StateLayout};
use crate::store::Rule;
use crate::update::{Optimizer, StepArgs};
pub(crate) use adam::Scalars;
use loops::Loops;
use terrace_kernels::update::AdamStep;

/// An optimization algorithm with its hyperparameters.
///
/// ```
/// use terrace_optimizer::{Algorithm, Lion, Moments, StateFormat, StateLayout, WeightType, optimizer};
///
/// let algorithm = Algorithm::Lion(Lion { weight_decay: 0.1, ..Lion::default() });
/// let layout = StateLayout::with_moments(StateFormat::Split, WeightType::Bf16, algorithm.moments())?;
/// let optimizer = optimizer(algorithm, layout)?;
/// assert_eq!(optimizer.layout().bytes_for(100), 800);
/// assert_eq!("lion".parse(), Ok(Algorithm::Lion(Lion::default())));
/// # Ok::<(), terrace_optimizer::OptimizerError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Algorithm {
    /// Adam with decoupled weight decay.
    AdamW(AdamW),
    /// Adam with weight decay added to the gradient: DeepSpeed's `adam_w_mode: false`.
    Adam(Adam),
    /// Adagrad.
    Adagrad(Adagrad),
    /// Lion.
    Lion(Lion),
    /// Stochastic gradient descent with momentum.
    Sgd(Sgd),
}

impl Algorithm {
    /// The moments that the algorithm keeps, for [`StateLayout::with_moments`].
    pub fn moments(&self) -> Moments {
        match self {
            Self::AdamW(_) | Self::Adam(_) => Moments::Both,
            Self::Adagrad(_) => Moments::Second,
            Self::Lion(_) | Self::Sgd(_) => Moments::First,
        }
    }

    /// The arguments of step `step` (the first is 1) with the configured weight decay and unscaled gradients.
    pub fn step(&self, step: u64, lr: f64) -> StepArgs {
        StepArgs { step, lr, grad_scale: 1.0, weight_decay: self.weight_decay() }
    }

    /// The weight decay of parameter groups that do not say otherwise.
    pub fn weight_decay(&self) -> f64 {
        match self {
            Self::AdamW(config) => config.weight_decay,
            Self::Adam(config) => config.weight_decay,
            Self::Adagrad(config) => config.weight_decay,
            Self::Lion(config) => config.weight_decay,
            Self::Sgd(config) => config.weight_decay,
        }
    }

    /// The same algorithm with the betas that a schedule asks for at some step
    /// ([`Schedule::betas`](crate::Schedule::betas)).
    ///
    /// Algorithms without betas come back unchanged, as in DeepSpeed, which then cycles the rate alone. Making an
    /// optimizer costs nothing, so one per step is fine; the state does not depend on it.
    #[must_use]
    pub fn with_betas(self, beta1: f64, beta2: f64) -> Self {
        match self {
            Self::AdamW(config) => Self::AdamW(AdamW { beta1, beta2, ..config }),
            Self::Adam(config) => Self::Adam(Adam { beta1, beta2, ..config }),
            Self::Lion(config) => Self::Lion(Lion { beta1, beta2, ..config }),
            Self::Adagrad(_) | Self::Sgd(_) => self,
        }
    }

    /// The step as a device's kernel takes it.
    ///
    /// # Errors
    /// There is no kernel for this algorithm, or a value is out of range.
    pub(crate) fn on_device(&self, args: &StepArgs) -> Result<AdamStep> {
        match self {
            Self::AdamW(config) => Ok(config.rule(args)?.step()),
            Self::Adam(config) => Ok(config.rule(args)?.step()),
            Self::Adagrad(_) | Self::Lion(_) | Self::Sgd(_) => {
                Err(OptimizerError::NotOnDevice(self.to_string()))
            }
        }
    }

    /// Refuses values for which the update is undefined, with torch's ranges.
    ///
    /// # Errors
    /// [`OptimizerError::Hyperparameter`] names the first offending value.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::AdamW(config) => config.validate(),
            Self::Adam(config) => config.validate(),
            Self::Adagrad(config) => config.validate(),
            Self::Lion(config) => config.validate(),
            Self::Sgd(config) => config.validate(),
        }
    }
}

/// `algorithm` over state stored as `layout`, on the widest instruction set of this processor.
///
/// # Errors
/// Hyperparameters out of range, and a layout with other moments than [`Algorithm::moments`].
pub fn optimizer(algorithm: Algorithm, layout: StateLayout) -> Result<Box<dyn Optimizer>> {
    optimizer_on(Isa::best(), algorithm, layout)
}

/// `algorithm` over state stored as `layout`, on an instruction set of choice: the bits are the same on all.
///
/// # Errors
/// As [`optimizer`].
pub fn optimizer_on(isa: Isa, algorithm: Algorithm, layout: StateLayout) -> Result<Box<dyn Optimizer>> {
    algorithm.validate()?;
    let (needed, found) = (algorithm.moments(), layout.moments());
    if needed != found {
        return Err(OptimizerError::WrongMoments { algorithm: algorithm.to_string(), needed, found });
    }
    Ok(match algorithm {
        Algorithm::AdamW(algorithm) => Box::new(Loops { isa, algorithm, layout }),
        Algorithm::Adam(algorithm) => Box::new(Loops { isa, algorithm, layout }),
        Algorithm::Adagrad(algorithm) => Box::new(Loops { isa, algorithm, layout }),
        Algorithm::Lion(algorithm) => Box::new(Loops { isa, algorithm, layout }),
        Algorithm::Sgd(algorithm) => Box::new(Loops { isa, algorithm, layout }),
    })
}

/// An algorithm that is one formula per parameter.
pub(crate) trait Elementwise: Copy + Send + Sync {
    /// The formula, with what is the same for every parameter of a step.
    type Rule: Rule;

    /// The formula of a step, its scalars in f64 until the last rounding; refuses what is out of range.
    fn rule(&self, args: &StepArgs) -> Result<Self::Rule>;

    /// What every moment of a parameter that was never stepped holds.
    fn initial_moment(&self) -> f32 {
        0.0
    }
}

impl From<AdamW> for Algorithm {
    fn from(config: AdamW) -> Self {
        Self::AdamW(config)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::AdamW(_) => "adamw",
            Self::Adam(_) => "adam",
            Self::Adagrad(_) => "adagrad",
            Self::Lion(_) => "lion",
            Self::Sgd(_) => "sgd",
        })
    }
}

impl FromStr for Algorithm {
    type Err = OptimizerError;

    /// The algorithm of that name with its default hyperparameters.
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "adamw" => Ok(Self::AdamW(AdamW::default())),
            "adam" => Ok(Self::Adam(Adam::default())),
            "adagrad" => Ok(Self::Adagrad(Adagrad::default())),
            "lion" => Ok(Self::Lion(Lion::default())),
            "sgd" => Ok(Self::Sgd(Sgd::default())),
            "muon" => Err(OptimizerError::WholeMatrices(text.to_owned())),
            _ => Err(OptimizerError::UnknownAlgorithm(text.to_owned())),
        }
    }
}

/// Weight decay as torch adds it to the gradient: not at all when it is zero, so that it cannot turn −0 into 0 or
/// an infinite weight into NaN.
#[inline(always)]
fn add_decay(gradient: f32, decay: f32, master: f32) -> f32 {
    if decay == 0.0 { gradient } else { gradient + decay * master }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{StateFormat, WeightType};

    const NAMES: [&str; 5] = ["adamw", "adam", "adagrad", "lion", "sgd"];

    #[test]
    fn names_round_trip_and_defaults_are_valid() {
        for name in NAMES {
            let algorithm: Algorithm = name.parse().unwrap();
            assert_eq!(algorithm.to_string(), name);
            assert_eq!(algorithm.validate(), Ok(()));
        }
        let error = "adamax".parse::<Algorithm>().unwrap_err().to_string();
        assert!(NAMES.iter().all(|name| error.contains(name)), "{error}");
    }

    #[test]
    fn muon_is_refused_with_the_reason() {
        let error = "muon".parse::<Algorithm>().unwrap_err().to_string();
        assert!(error.starts_with("muon") && error.contains("whole matrices"), "{error}");
    }

    #[test]
    fn layouts_must_have_the_moments() {
        for name in NAMES {
            let algorithm: Algorithm = name.parse().unwrap();
            for moments in [Moments::First, Moments::Second, Moments::Both] {
                let layout =
                    StateLayout::with_moments(StateFormat::Split, WeightType::Bf16, moments).unwrap();
                assert_eq!(optimizer(algorithm, layout).is_ok(), moments == algorithm.moments(), "{name}");
            }
        }
    }

    #[test]
    fn betas_follow_a_schedule_where_there_are_betas() {
        let betas = |name: &str| name.parse::<Algorithm>().unwrap().with_betas(0.85, 0.99);
        assert_eq!(betas("lion"), Algorithm::Lion(Lion { beta1: 0.85, beta2: 0.99, ..Lion::default() }));
        assert_eq!(betas("adam"), Algorithm::Adam(Adam { beta1: 0.85, beta2: 0.99, ..Adam::default() }));
        assert_eq!(betas("sgd"), Algorithm::Sgd(Sgd::default()));
    }
}
