//! Arbitrary requests are cut into pieces that cover them exactly.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| terrace_aio::fuzzing::request_split(bytes));
