//! What this machine can do: measured once, written down, and compared with what a step needs.
//!
//! [`Profile`] is the file, [`measure`] and [`card`] fill it, [`Floor`](crate::floor::Floor) reads it.

pub mod card;
pub mod machine;
pub mod measure;
pub mod profile;

pub use machine::Machine;
pub use profile::{Calibration, Card, Found, Gemm, MemoryRates, OptimizerRate, Profile, Rates, TrainingRate};
