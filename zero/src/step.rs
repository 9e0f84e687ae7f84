//! What goes into a training step beside its batches, and what comes out.

/// What a schedule says about one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepRates {
    /// The learning rate.
    pub lr: f64,
    /// The decay rates of the moments instead of the configured ones, for a schedule that moves them; algorithms without betas
    /// ignore them.
    pub betas: Option<(f64, f64)>,
}

impl From<f64> for StepRates {
    /// This learning rate with the configured betas.
    fn from(lr: f64) -> Self {
        Self { lr, betas: None }
    }
}

/// What a step did.
#[derive(Debug, Clone, Default)]
pub struct StepReport {
    /// Number of the step; the first is 1.
    pub step: u64,
    /// Mean loss over all terms of the step.
    pub loss: f64,
    /// Global norm of the gradient before clipping, without the loss scale; not finite when the step was skipped.
    pub grad_norm: f64,
    /// What the loss was multiplied with before backward, in a run with a loss scale.
    pub loss_scale: Option<f64>,
    /// Whether the scaled gradient overflowed, so that weights and moments are those of the step before.
    pub skipped: bool,
    /// Whether what was updated beside backward, before the norm was known, could be kept; `None` if nothing was, or no norm changes an
    /// update.
    pub speculated: Option<bool>,
    /// Terms in the loss.
    pub loss_terms: u64,
    /// Wall-clock seconds of the whole step.
    pub seconds: f64,
    /// Of these, forward and backward with everything they wait for.
    pub compute_seconds: f64,
    /// Of these, the optimizer after backward.
    pub update_seconds: f64,
    /// Of these, making the step durable.
    pub commit_seconds: f64,
    /// Seconds that compute waited for weights.
    pub weights_stall_seconds: f64,
    /// Seconds that compute waited for activations that go to disk and come back.
    pub activations_stall_seconds: f64,
    /// Seconds that backward waited for room for gradients, until updates or the disk had taken earlier ones.
    pub gradients_stall_seconds: f64,
    /// Seconds that the optimizer waited for its state or gradients.
    pub state_stall_seconds: f64,
    /// Bytes sent to a device with memory of its own during the step.
    pub upload_bytes: u64,
    /// Bytes that came back from it.
    pub download_bytes: u64,
    /// Most of its memory that the run has used, in bytes.
    pub device_peak_bytes: u64,
}
