//! What every engine promises.
//!
//! A case owns its rig, for some cases drop the engine under their requests.
#![expect(clippy::needless_pass_by_value, reason = "a case owns its rig")]

mod errors;
mod faults;
mod lifetimes;
mod transfers;
mod urgency;

use crate::rig::Rig;

/// Lists functions with their names.
macro_rules! cases {
    ($($module:ident :: $case:ident),* $(,)?) => { &[$((stringify!($case), $module::$case)),*] };
}

/// A case: panics when the engine breaks its promise.
pub type Case = fn(Rig);

/// Every case of the suite.
pub const CASES: &[(&str, Case)] = cases![
    transfers::odd_sizes_and_offsets,
    transfers::odd_memory_addresses,
    transfers::segments_over_several_files,
    transfers::one_request_over_three_files_in_pieces,
    transfers::files_in_several_places_at_once,
    transfers::more_blocks_than_the_queue_holds,
    transfers::adjacent_small_writes_keep_their_neighbours,
    transfers::several_threads_at_once,
    transfers::files_are_preallocated_with_zeros,
    transfers::writes_make_a_file_longer_exactly,
    transfers::large_and_small_writes_extend_together,
    transfers::what_was_written_is_there_after_reopening,
    errors::reading_past_the_end_names_the_range,
    errors::unknown_files_are_refused,
    errors::opening_fails_for_missing_and_existing_files,
    errors::read_only_files_are_not_written,
    errors::bad_ranges_are_refused,
    errors::empty_requests_succeed,
    errors::an_error_leaves_the_engine_usable,
    errors::open_files_are_not_removed,
    lifetimes::dropped_tickets_park_their_buffers,
    lifetimes::failed_requests_give_their_buffers_back,
    lifetimes::an_engine_may_be_dropped_with_requests_in_flight,
    lifetimes::closing_waits_for_requests,
    lifetimes::syncing_resolves_to_nothing,
    lifetimes::tickets_are_futures,
    lifetimes::observers_run_once_and_first,
    urgency::urgent_requests_go_ahead_of_what_waits,
    urgency::others_have_turns_beside_a_stream_of_urgent_requests,
];

/// The cases for an engine under a layer that injects faults.
pub const FAULT_CASES: &[(&str, Case)] = cases![
    faults::failed_writes_leave_their_neighbours_alone,
    faults::failed_reads_fail_alone,
    faults::failed_syncs_can_be_repeated,
    faults::real_and_injected_errors_mix,
];
