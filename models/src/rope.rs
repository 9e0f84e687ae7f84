//! Frequencies of the rotary position embedding, scaled the way the configuration asks.
//!
//! Both spellings are read: `rope_theta` beside `rope_scaling` (with `rope_type` or the older `type`), and
//! `rope_parameters`, which holds everything. The formulas are those of transformers' `modeling_rope_utils`.

use crate::entries::Entries;
use crate::{ModelError, Result};
use std::f64::consts::TAU;

/// Rotary position embedding of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the series is changed for longer contexts.
    pub scaling: RopeScaling,
}

/// Change of the frequencies that extends the context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// All frequencies divided by `factor` (Chen et al., arXiv 2306.15595).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth transition between.
    Llama3 {
        /// The divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original_positions / low_frequency` are long.
        low_frequency: f64,
        /// Wavelengths below `original_positions / high_frequency` are short.
        high_frequency: f64,
        /// Context of the original training.
        original_positions: f64,
    },
}

impl Rope {
    /// No scaling.
    pub fn new(theta: f64) -> Self {
        Self { theta, scaling: RopeScaling::Default }
    }

    /// Reads whichever spelling the configuration uses.
    pub(crate) fn parse(config: &Entries<'_>, head_size: usize, positions_max: usize) -> Result<Self> {
        let theta_of = |at: &Entries<'_>| {
            let theta_at = if at.has_value("rope_theta") { at } else { config };
            if theta_at.has_value("rope_theta") { theta_at.positive("rope_theta") } else { Ok(10_000.0) }
        };
        let filled = |key: &str| config.object(key).map(|found| found.filter(|found| !found.is_empty()));
        let (parameters, older) = (filled("rope_parameters")?, filled("rope_scaling")?);
        if let (Some(parameters), Some(older)) = (&parameters, &older)
            && (scaling(parameters, positions_max)? != scaling(older, positions_max)?
                || older.has_value("rope_theta") && older.positive("rope_theta")? != theta_of(parameters)?)
        {
            let detail = "says something else than rope_parameters: put what is meant there and remove it";
            return Err(config.error("rope_scaling", detail.into()));
        }
        let nested = parameters.or(older);
        let theta = nested.as_ref().map_or_else(|| theta_of(config), theta_of)?;
        for at in [Some(config), nested.as_ref()].into_iter().flatten() {
            let partial = at.number_or("partial_rotary_factor", 1.0)?;
            if partial != 1.0 {
                return Err(ModelError::Unsupported {
                    what: "partial_rotary_factor".into(),
                    found: partial.to_string(),
                    supported: format!("1 (all {head_size} elements of a head are rotated)"),
                });
            }
        }
        let scaling = match &nested {
            Some(nested) => scaling(nested, positions_max)?,
            None => RopeScaling::Default,
        };
        Ok(Self { theta, scaling })
    }

    /// The angle per position of each of the K/2 element pairs of a head. Computed in f64, rounded once.
    pub fn inverse_frequencies(&self, head_size: usize) -> Vec<f32> {
        (0..head_size / 2)
            .map(|i| {
                let frequency = self.theta.powf(-((2 * i) as f64) / head_size as f64);
                self.scaling.apply(frequency) as f32
            })
            .collect()
    }
}

impl RopeScaling {
    fn apply(self, frequency: f64) -> f64 {
        match self {
            Self::Default => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_frequency, high_frequency, original_positions } => {
                let wavelength = TAU / frequency;
                if wavelength < original_positions / high_frequency {
                    frequency
                } else if wavelength > original_positions / low_frequency {
                    frequency / factor
                } else {
                    let smooth =
                        (original_positions / wavelength - low_frequency) / (high_frequency - low_frequency);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

fn scaling(nested: &Entries<'_>, positions_max: usize) -> Result<RopeScaling> {
    if let Some(key) = nested.first_object() {
        let detail = "holds parameters of its own for some layers, which are not supported";
        return Err(nested.error(key, detail.into()));
    }
    let kind = match nested.string("rope_type")? {
        Some(kind) => kind,
        None => nested.string("type")?.unwrap_or("default"),
    };
    match kind {
        "default" => Ok(RopeScaling::Default),
        "linear" => Ok(RopeScaling::Linear { factor: nested.positive("factor")? }),
        "llama3" => {
            let low_frequency = nested.positive("low_freq_factor")?;
            let high_frequency = nested.positive("high_freq_factor")?;
            if high_frequency <= low_frequency {
                let detail = format!("is {high_frequency}; it must exceed low_freq_factor = {low_frequency}");
                return Err(nested.error("high_freq_factor", detail));
            }
            let original = nested.size_or("original_max_position_embeddings", positions_max)?;
            let factor = nested.positive("factor")?;
            Ok(RopeScaling::Llama3 {
                factor,
                low_frequency,
                high_frequency,
                original_positions: original as f64,
            })
        }
        other => Err(ModelError::Unsupported {
            what: "rope scaling type".into(),
            found: format!("\"{other}\""),
            supported: "\"default\", \"linear\", \"llama3\"".into(),
        }),
    }
}
