//! Frequencies of the rotary position embedding, scaled the way the configuration asks.
//!
//! Both spellings are read: `rope_theta` beside `rope_scaling` (with `rope_type` or the older `type`), and
//! `rope_parameters`, which holds everything. The formulas are those of transformers' `modeling_rope_utils`.

use crate::entries::Entries;
use crate::family::Family;
use crate::{ModelError, Result};
use std::f64::consts::TAU;

/// Rotary position embedding of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// Elements of each head that are rotated, 2P: the first ones.
    pub size: usize,
    /// How the series is changed for longer contexts.
    pub scaling: RopeScaling,
}

/// Change of the frequencies that extends the context.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// None.
    Default,
    /// All frequencies divided by `factor` (Chen et al., arXiv 2306.15595).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Frequencies that change with the length of what is longer than the model was trained for: none up to there, and longer
    /// sequences are refused.
    Dynamic,
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
    /// YaRN (Peng et al., arXiv 2309.00071): by element pair, frequencies that turn fast are kept, slow ones divided by `factor`, with a
    /// ramp between; cosines and sines are multiplied by `attention_factor`.
    Yarn {
        /// The divisor of slow frequencies.
        factor: f64,
        /// Multiplies cosines and sines.
        attention_factor: f64,
        /// Turns within the original context above which a frequency is kept.
        beta_fast: f64,
        /// Turns below which it is divided.
        beta_slow: f64,
        /// Context of the original training.
        original_positions: f64,
        /// The ends of the ramp are rounded to whole pairs, outwards.
        truncate: bool,
    },
    /// That of Hunyuan, whose folders call it dynamic: the base of the series multiplied by `alpha^(2P/(2P - 2))`, whatever the length.
    Stretched {
        /// How many times as long contexts are, about.
        alpha: f64,
    },
    /// That of Gemma 4: the series of all pairs of a head, divided by `factor`, of which the first `pairs` turn and the others do not.
    Proportional {
        /// How many turn.
        pairs: usize,
        /// The divisor.
        factor: f64,
    },
    /// LongRoPE (Ding et al., arXiv 2402.13753): the frequency of each element pair divided by a factor of its own; cosines and sines are
    /// multiplied by `attention_factor`.
    Long {
        /// The divisors for sequences within the original context.
        short: Vec<f64>,
        /// The divisors for longer ones, at all of their positions.
        long: Vec<f64>,
        /// Multiplies cosines and sines.
        attention_factor: f64,
        /// Context of the original training.
        original_positions: usize,
    },
}

/// What some families call their kinds of layers: those that see everything, and those with a window.
const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

impl Rope {
    /// Reads whichever spelling the configuration uses; and that of layers with a window, if it is another.
    pub(crate) fn parse(
        config: &Entries<'_>,
        family: Family,
        head_size: usize,
        positions_max: usize,
        default_theta: f64,
    ) -> Result<(Self, Option<Self>)> {
        // The base of layers with a window, unless it is that of the others.
        let local_theta = match family {
            Family::Olmo3 => None,
            Family::Gemma3 => Some(config.positive_or("rope_local_base_freq", 10_000.0)?),
            _ => {
                return Ok((Self::parse_one(config, family, head_size, positions_max, default_theta)?, None));
            }
        };
        let of_kinds = config.object("rope_parameters")?.filter(|all| KINDS.iter().any(|kind| all.has(kind)));
        let Some(of_kinds) = of_kinds else {
            // The older spelling, whose scaling is for layers that see everything.
            let rope = Self::parse_one(config, family, head_size, positions_max, default_theta)?;
            let (theta, scaling) = (local_theta.unwrap_or(rope.theta), RopeScaling::Default);
            return Ok((rope, Some(Self { theta, size: head_size, scaling })));
        };
        let theta = config.positive_or("rope_theta", default_theta)?;
        let of = |kind: &str, theta: f64| {
            let plain = Self { theta, size: head_size, scaling: RopeScaling::Default };
            let Some(nested) = of_kinds.object(kind)? else { return Ok(plain) };
            let theta = nested.positive_or("rope_theta", theta)?;
            let scaling = scaling(config, &nested, family, head_size, positions_max)?;
            Ok(Self { theta, scaling, ..plain })
        };
        let (rope, window) = (of(KINDS[0], theta)?, of(KINDS[1], local_theta.unwrap_or(theta))?);
        let older = config.object("rope_scaling")?.filter(|older| !older.is_empty());
        if let Some(older) = older
            && scaling(config, &older, family, head_size, positions_max)? != rope.scaling
        {
            return Err(two_scalings(config));
        }
        window.refuse_lengths()?;
        Ok((rope, Some(window)))
    }

    /// Those of Gemma 4, whose heads are of `sizes` in layers that see everything and in those with a window.
    pub(crate) fn parse_by_kind(
        config: &Entries<'_>,
        family: Family,
        sizes: [usize; 2],
        positions_max: usize,
    ) -> Result<(Self, Option<Self>)> {
        let [full_size, window_size] = sizes;
        let Some(of_kinds) = config.object("rope_parameters")? else {
            let scaling = RopeScaling::Proportional { pairs: full_size / 8, factor: 1.0 };
            let window = Self { theta: 10_000.0, size: window_size, scaling: RopeScaling::Default };
            return Ok((Self { theta: 1_000_000.0, size: full_size, scaling }, Some(window)));
        };
        let of = |kind: &str, size: usize| {
            let nested = of_kinds.object(kind)?;
            let nested = nested.ok_or_else(|| of_kinds.error(kind, "is missing".into()))?;
            let theta = nested.positive("rope_theta")?;
            if nested.string("rope_type")? == Some("proportional") {
                let part = nested.positive_or(PART, 1.0)?;
                if part > 1.0 {
                    return Err(nested.error(PART, format!("is {part}; it must be at most 1")));
                }
                let pairs = (part * size as f64 / 2.0) as usize;
                let scaling = RopeScaling::Proportional { pairs, factor: nested.positive_or("factor", 1.0)? };
                return Ok(Self { theta, size, scaling });
            }
            if nested.has_value(PART) {
                rotated_size(&nested, family, size)?;
            }
            let scaling = scaling(config, &nested, family, size, positions_max)?;
            Ok(Self { theta, size, scaling })
        };
        let (rope, window) = (of(KINDS[0], full_size)?, of(KINDS[1], window_size)?);
        window.refuse_lengths()?;
        Ok((rope, Some(window)))
    }

    /// Refuses frequencies that change with the length of sequences.
    fn refuse_lengths(&self) -> Result {
        if !matches!(self.scaling, RopeScaling::Dynamic | RopeScaling::Long { .. }) {
            return Ok(());
        }
        Err(ModelError::Unsupported {
            what: "rope scaling type of layers with a window".into(),
            found: "one that changes with the length".into(),
            supported: "\"default\", \"linear\", \"llama3\", \"yarn\"".into(),
        })
    }

    fn parse_one(
        config: &Entries<'_>,
        family: Family,
        head_size: usize,
        positions_max: usize,
        default_theta: f64,
    ) -> Result<Self> {
        let theta_of = |at: &Entries<'_>| {
            let theta_at = if at.has_value("rope_theta") { at } else { config };
            theta_at.positive_or("rope_theta", default_theta)
        };
        let filled = |key: &str| config.object(key).map(|found| found.filter(|found| !found.is_empty()));
        let (parameters, older) = (filled("rope_parameters")?, filled("rope_scaling")?);
        let all = [parameters.as_ref(), older.as_ref(), Some(config)].into_iter().flatten();
        let mut size = None;
        for at in all.filter(|at| at.has_value(PART)) {
            let of_this = rotated_size(at, family, head_size)?;
            size = size.or(Some(of_this));
        }
        let size = match size {
            Some(size) => size,
            // As the published folders say it.
            None if family == Family::MiniMaxM2 && config.has_value("rotary_dim") => {
                config.size("rotary_dim")?
            }
            None if family.rotated_part() < 1.0 => part_of(config, head_size, family.rotated_part())?,
            None => head_size,
        };
        let scaling = |nested: &Entries<'_>| scaling(config, nested, family, size, positions_max);
        if let (Some(parameters), Some(older)) = (&parameters, &older)
            && (scaling(parameters)? != scaling(older)?
                || older.has_value("rope_theta") && older.positive("rope_theta")? != theta_of(parameters)?)
        {
            return Err(two_scalings(config));
        }
        let nested = parameters.or(older);
        let theta = nested.as_ref().map_or_else(|| theta_of(config), theta_of)?;
        let scaling = match nested.as_ref() {
            Some(nested) => scaling(nested)?,
            None if family == Family::GptOss => RopeScaling::OF_GPT_OSS,
            None if family == Family::Ministral3 => RopeScaling::OF_MINISTRAL,
            None => RopeScaling::Default,
        };
        if theta == 1.0 && matches!(scaling, RopeScaling::Yarn { .. }) {
            return Err(config.error("rope_theta", "is 1, with which \"yarn\" has no frequencies".into()));
        }
        Ok(Self { theta, size, scaling })
    }

    /// The angle per position of each of the P element pairs of a head that are rotated, for sequences of `positions`. Computed in f64,
    /// rounded once.
    pub fn inverse_frequencies(&self, positions: usize) -> Vec<f32> {
        let ramp = self.ramp();
        let base = match self.scaling {
            RopeScaling::Stretched { alpha } => {
                self.theta * alpha.powf(self.size as f64 / (self.size as f64 - 2.0))
            }
            _ => self.theta,
        };
        (0..self.size / 2)
            .map(|i| {
                let frequency = base.powf(-((2 * i) as f64) / self.size as f64);
                match (ramp, &self.scaling) {
                    (Some((low, high, factor)), _) => {
                        let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        (frequency / factor * divided + frequency * (1.0 - divided)) as f32
                    }
                    (None, RopeScaling::Long { short, long, original_positions, .. }) => {
                        let divisors = if positions > *original_positions { long } else { short };
                        (frequency / divisors[i]) as f32
                    }
                    (None, RopeScaling::Proportional { pairs, .. }) if i >= *pairs => 0.0,
                    (None, scaling) => scaling.apply(frequency) as f32,
                }
            })
            .collect()
    }

    /// The longest sequences for which [`inverse_frequencies`](Self::inverse_frequencies) are those of short ones, if there are others.
    pub fn short_positions(&self) -> Option<usize> {
        match self.scaling {
            RopeScaling::Long { original_positions, .. } => Some(original_positions),
            _ => None,
        }
    }

    /// The longest sequences of a model whose `config.json` names `positions_max`, and under `other_names` for that number others, if so.
    ///
    /// Folders whose owner was told to add the scaling alone keep the positions of before. Some say the longer context elsewhere.
    pub(crate) fn positions(
        &self,
        family: Family,
        positions_max: usize,
        other_names: Option<usize>,
    ) -> usize {
        let stretched = match self.scaling {
            RopeScaling::Dynamic => return positions_max,
            RopeScaling::Yarn { factor, original_positions, .. } => (factor * original_positions) as usize,
            // Whose positions are stretched already.
            RopeScaling::Linear { .. } if family.is_gemma() => positions_max,
            RopeScaling::Linear { factor } => (factor * positions_max as f64) as usize,
            _ => positions_max,
        };
        stretched.max(positions_max).max(other_names.unwrap_or(0))
    }

    /// What cosines and sines are multiplied by.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } | RopeScaling::Long { attention_factor, .. } => {
                attention_factor as f32
            }
            _ => 1.0,
        }
    }

    /// Of [`RopeScaling::Yarn`]: the element pairs between which its ramp rises, and the divisor behind it.
    fn ramp(&self) -> Option<(f64, f64, f64)> {
        let RopeScaling::Yarn { factor, beta_fast, beta_slow, original_positions, truncate, .. } =
            self.scaling
        else {
            return None;
        };
        let pair_of = |turns: f64| {
            self.size as f64 * (original_positions / (turns * TAU)).ln() / (2.0 * self.theta.ln())
        };
        let (low, high) = (pair_of(beta_fast), pair_of(beta_slow));
        let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
        // The upper limit is that of transformers, which counts elements here and pairs everywhere else.
        let (low, high) = (low.max(0.0), high.min(self.size as f64 - 1.0));
        Some((low, if low == high { high + 0.001 } else { high }, factor))
    }
}

/// What multiplies queries, more the further behind the context of the first training they are (Nakanishi, "Scalable-Softmax Is Superior
/// for Attention", arXiv 2501.19399; as here, Llama 4): `1 + beta·ln(1 + ⌊(position + first) / original_positions⌋)`. It is not rounded to the type of activations, as transformers does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryFactor {
    /// How much more.
    pub beta: f64,
    /// Up to there it is 1.
    pub original_positions: usize,
    /// The number of the first position: 0, or 1 in Llama 4.
    pub first: usize,
    /// It multiplies the queries of layers that do not rotate them, and those alone.
    pub unrotated_alone: bool,
}

impl QueryFactor {
    /// What the configuration class of Ministral 3 fills in.
    const OF_MINISTRAL: Self =
        Self { beta: 0.1, original_positions: 16_384, first: 0, unrotated_alone: false };

    /// `None` of families that have none.
    pub(crate) fn parse(config: &Entries<'_>, family: Family) -> Result<Option<Self>> {
        match family {
            Family::Llama4 => return Self::of_llama(config),
            Family::Ministral3 => {}
            _ => return Ok(None),
        }
        let filled = |key: &str| config.object(key).map(|found| found.filter(|found| !found.is_empty()));
        let nested = match filled("rope_parameters")? {
            Some(nested) => Some(nested),
            None => filled("rope_scaling")?,
        };
        let Some(nested) = nested else { return Ok(Some(Self::OF_MINISTRAL)) };
        if nested.number_or("llama_4_scaling_beta", 0.0)? == 0.0 {
            return Ok(None);
        }
        let key = "original_max_position_embeddings";
        let original_positions = match config.optional_size(key)? {
            Some(outer) => outer,
            None => nested.size(key)?,
        };
        Ok(Some(Self {
            beta: nested.positive("llama_4_scaling_beta")?,
            original_positions,
            ..Self::OF_MINISTRAL
        }))
    }

    fn of_llama(config: &Entries<'_>) -> Result<Option<Self>> {
        // Folders of the first days say 4 and mean yes.
        let (tuning, scale) = ("attn_temperature_tuning", "attn_scale");
        let is_tuned = match config.is_number(tuning) {
            true => config.number_or(tuning, 0.0)? != 0.0,
            false => config.flag(tuning, true)?,
        };
        let original_positions = config.size_or("floor_scale", 8192)?;
        if !is_tuned || config.number(scale)? == Some(0.0) {
            return Ok(None);
        }
        let beta = config.positive_or(scale, 0.1)?;
        Ok(Some(Self { beta, original_positions, first: 1, unrotated_alone: true }))
    }

    /// The factor of a position.
    pub fn at(&self, position: usize) -> f32 {
        (1.0 + self.beta * (((position + self.first) / self.original_positions.max(1)) as f64).ln_1p()) as f32
    }
}

impl RopeScaling {
    /// What its class in transformers fills in.
    const OF_GPT_OSS: Self = Self::Yarn {
        factor: 32.0,
        // 1 + ln(32)/10.
        attention_factor: 1.346_573_590_279_972_7,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_positions: 4096.0,
        truncate: false,
    };

    /// What the configuration class of Ministral 3 fills in.
    const OF_MINISTRAL: Self = Self::Yarn {
        factor: 16.0,
        attention_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_positions: 16_384.0,
        truncate: true,
    };

    fn apply(&self, frequency: f64) -> f64 {
        match *self {
            // The latter three go by the pair, not by its frequency, or by the base.
            Self::Default
            | Self::Dynamic
            | Self::Yarn { .. }
            | Self::Long { .. }
            | Self::Stretched { .. } => frequency,
            Self::Linear { factor } | Self::Proportional { factor, .. } => frequency / factor,
            Self::Llama3 { factor, low_frequency, high_frequency, original_positions } => {
                let wavelength = TAU / frequency;
                if wavelength < original_positions / high_frequency {
                    frequency
                } else if wavelength > original_positions / low_frequency || low_frequency == high_frequency {
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

fn two_scalings(config: &Entries<'_>) -> ModelError {
    let detail = "says something else than rope_parameters: put what is meant there and remove it";
    config.error("rope_scaling", detail.into())
}

/// The part of each head that is rotated.
const PART: &str = "partial_rotary_factor";

/// As many elements of a head as that part has.
fn rotated_size(at: &Entries<'_>, family: Family, head_size: usize) -> Result<usize> {
    let part = at.positive(PART)?;
    if part == 1.0 {
        return Ok(head_size);
    }
    // The classes of the others rotate all of a head, whatever is said here.
    if !matches!(family, Family::Phi3 | Family::MiniMaxM2) && family.rotated_part() == 1.0 {
        return Err(ModelError::Unsupported {
            what: PART.into(),
            found: part.to_string(),
            supported: format!("1 (all {head_size} elements of a head are rotated)"),
        });
    }
    part_of(at, head_size, part)
}

fn part_of(at: &Entries<'_>, head_size: usize, part: f64) -> Result<usize> {
    let size = (head_size as f64 * part) as usize;
    if !(part < 1.0 && size > 0 && size.is_multiple_of(2)) {
        let detail = format!(
            "is {part}, which makes {size} of the {head_size} elements of a head; it must be a part for which that is an even number"
        );
        return Err(at.error(PART, detail));
    }
    Ok(size)
}

/// `config` is the whole of config.json, `nested` the part of it that describes the scaling.
fn scaling(
    config: &Entries<'_>,
    nested: &Entries<'_>,
    family: Family,
    size: usize,
    positions_max: usize,
) -> Result<RopeScaling> {
    if let Some(key) = nested.first_object() {
        let detail = "holds parameters of its own for some layers, which are not supported";
        return Err(nested.error(key, detail.into()));
    }
    let kind = match nested.string("rope_type")? {
        Some(kind) => kind,
        None => nested.string("type")?.unwrap_or("default"),
    };
    // Phi 3 had two other names for it at first.
    let kind = if family == Family::Phi3 && ["su", "yarn"].contains(&kind) { "longrope" } else { kind };
    // transformers goes by the one of the top level, if it is there.
    let original = || {
        let key = "original_max_position_embeddings";
        let inner = |outer: Option<usize>| match (outer, family) {
            (Some(outer), _) => Ok(outer),
            // The class has the entry, whatever is nested.
            (None, Family::Phi3) => Ok(4096),
            (None, _) => nested.size_or(key, positions_max),
        };
        config.optional_size(key).and_then(inner)
    };
    match kind {
        "default" => Ok(RopeScaling::Default),
        "longrope" => long(nested, size, original()?, positions_max),
        other if family == Family::Phi3 => Err(ModelError::Unsupported {
            what: "rope scaling type of Phi3ForCausalLM".into(),
            found: format!("\"{other}\""),
            supported: "\"default\", \"longrope\"".into(),
        }),
        "dynamic" if has_alpha(nested, family)? => {
            Ok(RopeScaling::Stretched { alpha: nested.positive("alpha")? })
        }
        "dynamic" if config.has_value("max_position_embeddings") => Ok(RopeScaling::Dynamic),
        "dynamic" => {
            let detail = "is missing; \"dynamic\" scaling of the rotary embedding begins there";
            Err(config.error("max_position_embeddings", detail.into()))
        }
        "linear" => Ok(RopeScaling::Linear { factor: nested.positive("factor")? }),
        "llama3" => {
            let low_frequency = nested.positive("low_freq_factor")?;
            let high_frequency = nested.positive("high_freq_factor")?;
            if high_frequency < low_frequency {
                let detail =
                    format!("is {high_frequency}; it must be at least low_freq_factor = {low_frequency}");
                return Err(nested.error("high_freq_factor", detail));
            }
            let factor = nested.positive("factor")?;
            let original_positions = original()? as f64;
            Ok(RopeScaling::Llama3 { factor, low_frequency, high_frequency, original_positions })
        }
        "yarn" => yarn(nested, original()? as f64, positions_max),
        other => Err(ModelError::Unsupported {
            what: "rope scaling type".into(),
            found: format!("\"{other}\""),
            supported: "\"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\", \"longrope\"".into(),
        }),
    }
}

/// Whether a Hunyuan stretches the base of its frequencies once and for all.
fn has_alpha(nested: &Entries<'_>, family: Family) -> Result<bool> {
    let is_one = matches!(family, Family::HunYuan | Family::HunYuanMoe);
    Ok(is_one && nested.number("alpha")?.is_some_and(|alpha| alpha != 0.0))
}

/// `_compute_longrope_parameters` of transformers, of heads of which `size` elements are rotated.
fn long(
    nested: &Entries<'_>,
    size: usize,
    original_positions: usize,
    positions_max: usize,
) -> Result<RopeScaling> {
    let divisors = |key: &str| {
        let listed = nested.numbers(key)?.ok_or_else(|| nested.error(key, "is missing".into()))?;
        if listed.len() != size / 2 || listed.iter().any(|divisor| *divisor <= 0.0) {
            let detail = format!(
                "has {} numbers; it must have {}, one for every two of the {size} elements of a head that are rotated, each above zero",
                listed.len(),
                size / 2
            );
            return Err(nested.error(key, detail));
        }
        Ok(listed)
    };
    let attention_factor = match nested.has_value("attention_factor") {
        true => nested.positive("attention_factor")?,
        false => {
            let factor = nested.positive_or("factor", positions_max as f64 / original_positions as f64)?;
            if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original_positions as f64).ln()).sqrt() }
        }
    };
    if !attention_factor.is_finite() {
        let detail = format!("is {original_positions}; with it there is no attention factor");
        return Err(nested.error("original_max_position_embeddings", detail));
    }
    let (short, long) = (divisors("short_factor")?, divisors("long_factor")?);
    Ok(RopeScaling::Long { short, long, attention_factor, original_positions })
}

/// What YaRN multiplies scores or rotated elements by, for contexts that are `factor` times as long.
pub(crate) fn yarn_scale(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * weight * factor.ln() + 1.0 }
}

/// `_compute_yarn_parameters` of transformers. It does not read `attn_factor`.
fn yarn(nested: &Entries<'_>, original_positions: f64, positions_max: usize) -> Result<RopeScaling> {
    let is_null = |key: &str| nested.has(key) && !nested.has_value(key);
    let factor = match is_null("factor") {
        true => positions_max as f64 / original_positions,
        false => nested.positive("factor")?,
    };
    let some = |key: &str| nested.number(key).map(|found| found.filter(|found| *found != 0.0));
    let scale = |weight: f64| yarn_scale(factor, weight);
    let attention_factor = match (some("mscale")?, some("mscale_all_dim")?) {
        _ if nested.has_value("attention_factor") => nested.positive("attention_factor")?,
        (Some(above), Some(below)) => scale(above) / scale(below),
        _ => scale(1.0),
    };
    if !(attention_factor.is_finite() && attention_factor > 0.0) {
        let detail = format!("and mscale_all_dim make an attention factor of {attention_factor}");
        return Err(nested.error("mscale", detail));
    }
    let turns = |key: &str, default: f64| match some(key)? {
        Some(_) => nested.positive(key),
        None => Ok(default),
    };
    Ok(RopeScaling::Yarn {
        factor,
        attention_factor,
        beta_fast: turns("beta_fast", 32.0)?,
        beta_slow: turns("beta_slow", 1.0)?,
        original_positions,
        truncate: !is_null("truncate") && nested.flag("truncate", true)?,
    })
}
