//! Arbitrary manifests are refused or read, and no damaged slot is accepted.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| terrace_tiers::fuzzing::manifest(bytes));
