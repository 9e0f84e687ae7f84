//! What a run is asked to do: flags over a DeepSpeed configuration file over defaults.

pub mod ds_config;
pub mod groups;
pub mod hjson;
pub mod run;
pub mod schedule;
pub mod section;
pub mod size;

pub use ds_config::{DsConfig, DsConfigError, DsOffload};
pub use groups::GroupFlag;
pub use run::{Length, TrainConfig};
pub use schedule::{ScheduleChoice, SchedulerFlag};
pub use size::ByteSize;
