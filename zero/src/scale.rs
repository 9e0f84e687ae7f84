//! The loss scale of a run, and how it travels with the committed state.
//!
//! A step whose gradient overflows is skipped: weights and moments stay, the scale moves, and what is committed is the same
//! state under the next number. So the scale is part of every commit, in front of the trainer's own note:
//!
//! ```text
//! | magic 8 | scale (f64) 8 | iteration 8 | last overflow 8 | hysteresis 8 | skipped 8 | note |
//! ```
//!
//! all little-endian; the last overflow is all ones when there was none.

use crate::{EngineConfig, EngineError, Result};
use terrace_optimizer::{LossScaleConfig, LossScaler, LossScalerState};

/// Bytes in front of the trainer's note.
const HEADER_BYTES: usize = 48;
const MAGIC: [u8; 8] = *b"TRCSCALE";

/// Steps skipped in a row at one scale, after which no step is expected to succeed. A dynamic scale moves long before, unless its
/// hysteresis is larger.
const STUCK_STEPS: u32 = 100;

/// The scaler, and how many steps it has skipped.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LossScale {
    scaler: LossScaler,
    pub(crate) skipped: u64,
    /// Steps skipped in a row at the scale of now. It is not committed: whoever resumes gets as many tries again.
    stuck: u32,
}

impl LossScale {
    pub(crate) fn new(config: LossScaleConfig) -> Result<Self> {
        let scaler = LossScaler::new(config).map_err(|e| refused(&e))?;
        Ok(Self { scaler, skipped: 0, stuck: 0 })
    }

    /// The scale after a committed step, if there is one in a run of this kind; `words` are those of the commit.
    pub(crate) fn committed(config: &EngineConfig, step: u64, words: &[u8]) -> Result<Option<Self>> {
        let config = config.training.as_ref().and_then(|training| training.loss_scale);
        // Step 0 is committed before there is a scale.
        config.map(|c| if step == 0 { Self::new(c) } else { Self::resume(c, words) }).transpose()
    }

    /// The scale that was committed with these words.
    pub(crate) fn resume(config: LossScaleConfig, committed: &[u8]) -> Result<Self> {
        let missing = || {
            EngineError::Config(
                "the state on disk has no loss scale, so it was trained without one: resume it with the original EngineConfig::dtype, or \
                 choose another directory"
                    .into(),
            )
        };
        let (header, _) = committed.split_at_checked(HEADER_BYTES).ok_or_else(missing)?;
        let (words, _) = header.as_chunks::<8>();
        if words[0] != MAGIC {
            return Err(missing());
        }
        let [scale, iteration, last_overflow, hysteresis, skipped] =
            std::array::from_fn(|i| u64::from_le_bytes(words[i + 1]));
        let state = LossScalerState {
            scale: f64::from_bits(scale),
            iteration,
            last_overflow: (last_overflow != u64::MAX).then_some(last_overflow),
            hysteresis: u32::try_from(hysteresis).unwrap_or(u32::MAX),
        };
        let scaler = LossScaler::resume(config, state).map_err(|e| refused(&e))?;
        Ok(Self { scaler, skipped, stuck: 0 })
    }

    /// What the loss of the next step is multiplied with.
    pub(crate) fn scale(&self) -> f64 {
        self.scaler.scale()
    }

    /// What the gradient of the next step is multiplied with.
    pub(crate) fn inverse(&self) -> f32 {
        self.scaler.inverse()
    }

    /// The scale after a step.
    ///
    /// # Errors
    /// The scale cannot go down any further, or has stayed the same for [`STUCK_STEPS`] skipped steps.
    pub(crate) fn after(&self, step: u64, safe: u64, overflow: bool) -> Result<Self> {
        let diverged = |reason: String| {
            EngineError::Diverged(format!("step {step}: {reason}; the state is still that of step {safe}"))
        };
        let mut next = *self;
        next.scaler.update(overflow).map_err(|e| diverged(e.to_string()))?;
        next.skipped += u64::from(overflow);
        next.stuck = if overflow && next.scale() == self.scale() { self.stuck + 1 } else { 0 };
        if next.stuck >= STUCK_STEPS {
            return Err(diverged(format!(
                "a gradient overflowed fp16 in {STUCK_STEPS} steps in a row at the loss scale {}: start over with a lower \
                 fp16.loss_scale, or 0 for one that adapts itself, or use bf16",
                self.scale()
            )));
        }
        Ok(next)
    }

    /// The words of a commit.
    pub(crate) fn words(&self, note: &[u8]) -> Vec<u8> {
        let LossScalerState { scale, iteration, last_overflow, hysteresis } = self.scaler.state();
        let last_overflow = last_overflow.unwrap_or(u64::MAX);
        let words = [scale.to_bits(), iteration, last_overflow, u64::from(hysteresis), self.skipped];
        let mut bytes = MAGIC.to_vec();
        words.iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
        bytes.extend_from_slice(note);
        bytes
    }
}

/// The trainer's note among the words of a commit.
pub(crate) fn note(committed: &[u8]) -> &[u8] {
    if committed.starts_with(&MAGIC) { committed.get(HEADER_BYTES..).unwrap_or_default() } else { committed }
}

fn refused(error: &terrace_optimizer::OptimizerError) -> EngineError {
    EngineError::Config(format!("the loss scale of fp16: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_committed_is_what_goes_on() {
        let config = LossScaleConfig { loss_scale_window: 2, ..LossScaleConfig::default() };
        let mut scale = LossScale::new(config).unwrap();
        for overflow in [false, true, true, false, false, false, true] {
            let words = scale.words(b"{\"loss\":1}");
            assert_eq!(words.len(), HEADER_BYTES + 10);
            let resumed = LossScale::resume(config, &words).unwrap();
            assert_eq!((resumed.scaler, resumed.skipped), (scale.scaler, scale.skipped));
            assert_eq!(note(&words), b"{\"loss\":1}");
            scale = scale.after(1, 0, overflow).unwrap();
        }
        assert_eq!((scale.skipped, scale.scale()), (3, 65536.0));
    }

    #[test]
    fn a_scale_that_never_helps_is_an_error() {
        let fixed = LossScaleConfig { loss_scale: 1e30, ..LossScaleConfig::default() };
        let slow = LossScaleConfig { hysteresis: u32::MAX, ..LossScaleConfig::default() };
        for config in [fixed, slow] {
            let mut scale = LossScale::new(config).unwrap();
            // One clean step starts the count anew.
            for overflow in [true, false].into_iter().chain([true; STUCK_STEPS as usize - 1]) {
                scale = scale.after(1, 0, overflow).unwrap();
            }
            let error = scale.after(102, 101, true).unwrap_err().to_string();
            for part in ["step 102: a gradient", "100 steps in a row", "bf16", "still that of step 101"] {
                assert!(error.contains(part), "{part:?} is in: {error}");
            }
        }
        let config = LossScaleConfig { initial_scale_power: 126, ..LossScaleConfig::default() };
        let mut falling = LossScale::new(config).unwrap();
        for _ in 0..=STUCK_STEPS {
            falling = falling.after(1, 0, true).unwrap();
        }
    }

    #[test]
    fn state_without_a_scale_is_refused_and_its_note_is_whole() {
        for words in [&b""[..], b"{}", &[b'{'; 100]] {
            let error = LossScale::resume(LossScaleConfig::default(), words).unwrap_err().to_string();
            assert!(error.contains("has no loss scale") && error.contains("EngineConfig::dtype"), "{error}");
            assert_eq!(note(words), words);
        }
        let config = LossScaleConfig { hysteresis: 0, ..LossScaleConfig::default() };
        let error = LossScale::new(config).unwrap_err().to_string();
        assert!(error.contains("fp16: hysteresis is 0"), "{error}");
    }
}
