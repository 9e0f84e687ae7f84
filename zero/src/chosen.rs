//! What a plan chose: as overrides that leave no other choice, and in words.

use crate::kept::{KeepCounts, Keeping};
use crate::kv::KvRoom;
use crate::plan::EnginePlan;
use crate::{EngineConfig, WindowOverrides};
use terrace_tiers::ByteSize;

impl EnginePlan {
    /// The overrides with which the planner has no choice but this plan.
    pub(crate) fn overrides(&self, config: &EngineConfig) -> WindowOverrides {
        let w = &self.windows;
        WindowOverrides {
            weight_slots: Some(w.weight_slots),
            chunk_elements: Some(w.chunk_elements),
            update_slots: Some(w.update_slots),
            gradient_groups: Some(w.gradient_groups),
            gradients_on_disk: Some(w.gradients_on_disk),
            activations_on_disk: Some(w.activations_on_disk),
            signals_stay: Some(w.signals_stay),
            uploads_ahead: Some(w.uploads_ahead),
            gradients_whole: Some(w.gradients_whole),
            kept_blocks: Some(w.keeping.counts.here),
            kept_on_host: Some(w.keeping.counts.on_host),
            kept_on_disk: Some(w.keeping.counts.on_disk),
            kept_slots: Some(w.kept_slots.in_flight),
            copied_weights: Some(w.caching.counts().0),
            copied_groups: Some(w.caching.counts().1),
            device_groups: Some(w.device_room.staying),
            state_groups: Some(w.device_room.state),
            kv_on_device: Some(w.kv_room.device),
            kv_on_host: Some(w.kv_room.host),
            packed_bytes: Some(w.packed_bytes),
            overlap: Some(config.overrides.overlap()),
            sync_ahead: config.overrides.sync_ahead,
        }
    }

    /// One line that says what was chosen.
    pub(crate) fn summary(&self) -> String {
        let w = &self.windows;
        let place = |on_disk| if on_disk { "disk" } else { "host" };
        let slots: Vec<String> =
            w.classes.iter().map(|c| format!("{} × {}", c.slots, ByteSize(c.slot_bytes as u64))).collect();
        let slots = if slots.is_empty() { "none".into() } else { slots.join(" + ") };
        let Keeping { counts: KeepCounts { here: count, on_host, on_disk }, of, .. } = w.keeping;
        let by = |place, blocks| if blocks > 0 { format!(" and {place} by {blocks}") } else { String::new() };
        let elsewhere = by("in host memory", on_host) + &by("on disk", on_disk);
        let copies = match w.caching.counts() {
            (0, _) => String::new(),
            (weights, all) => {
                let groups = self.spec.groups.iter().filter(|group| group.elements > 0).count();
                format!(
                    "; copies in memory of the weights of {weights} of {groups} groups and of all state of {all}"
                )
            }
        };
        let stay = match w.device_room.staying {
            0 => String::new(),
            groups => {
                format!("; weights of {groups} of {} groups stay on the device", self.spec.groups.len())
            }
        };
        let state = match w.device_room.state {
            0 => String::new(),
            groups => format!("; all state of {groups} groups is on the device"),
        };
        let keys = match w.kv_room {
            KvRoom { device: 0, host: 0 } => String::new(),
            KvRoom { device, host: 0 } => {
                format!("; keys and values of {device} blocks stay where they are used")
            }
            KvRoom { device, host } => {
                format!(
                    "; keys and values of {device} blocks stay where they are used, of {host} in host memory"
                )
            }
        };
        let training = if self.blocks.is_empty() {
            String::new()
        } else {
            format!(
                "; update slots {} of {} elements; gradients on {}, activations on {}, kept by {count} of {of} blocks{elsewhere}",
                w.update_slots,
                w.chunk_elements,
                place(w.gradients_on_disk),
                place(w.activations_on_disk)
            )
        };
        format!("weight slots {slots}{training}{copies}{stay}{state}{keys}")
    }
}
