//! One suite for every device; a backend adds a fixture.

mod suite;

use std::collections::BTreeSet;
use terrace_device::host::{HostDevice, POISON};
use terrace_device::sim::{SimDevice, SimDeviceConfig};
use terrace_device::{Bytes, BytesMut, Device, StreamKind};

#[test]
fn host_unified() {
    suite::all(&HostDevice::unified());
}

#[test]
fn host_discrete() {
    suite::all(&HostDevice::discrete());
}

#[test]
fn simulated() {
    for seed in 0..50 {
        for early_one_in in [0, 1, 2, 8] {
            suite::all(&SimDevice::new(SimDeviceConfig { seed, early_one_in, ..SimDeviceConfig::default() }));
        }
    }
}

/// The canary: code that skips the wait must see poison, or discrete mode proves nothing.
#[test]
fn a_missing_wait_reads_poison() {
    let device = HostDevice::discrete();
    let stream = device.stream(StreamKind::Upload).unwrap();
    let src = vec![7u8; 64];
    let mut dst = vec![0u8; 64];
    // SAFETY: both vectors outlive the event, which is waited for below; reading early is the point of the test.
    unsafe { stream.copy(Bytes::from_host(&src), BytesMut::from_host(&mut dst)).unwrap() };
    let event = stream.record().unwrap();
    assert!(!event.is_done());
    assert!(dst.iter().all(|&b| b == POISON));
    event.synchronize().unwrap();
    assert_eq!(dst, src);
}

/// A copy of a simulated card runs early under some seeds and late under others, so that either mistake is seen; and a wait that
/// is forgotten leaves poison.
#[test]
fn a_simulated_copy_runs_at_any_legal_point() {
    let outcome = |seed, lost_wait_one_in| {
        let device = SimDevice::new(SimDeviceConfig { seed, early_one_in: 2, lost_wait_one_in });
        let up = device.stream(StreamKind::Upload).unwrap();
        let compute = device.stream(StreamKind::Compute).unwrap();
        let mut src = vec![7u8; 64];
        let mut dst = vec![0u8; 64];
        // SAFETY: both vectors outlive the event, which is waited for below; what lies between is the point of the test.
        unsafe { up.copy(Bytes::from_host(&src), BytesMut::from_host(&mut dst)).unwrap() };
        let event = up.record().unwrap();
        src.fill(8);
        compute.wait(&*event).unwrap();
        let found = dst[0];
        event.synchronize().unwrap();
        found
    };
    let outcomes = |lost| (0..40).map(|seed| outcome(seed, lost)).collect::<BTreeSet<_>>();
    assert_eq!(outcomes(0), BTreeSet::from([7, 8]));
    assert_eq!(outcomes(1), BTreeSet::from([7, POISON]));
}

#[test]
fn an_exhausted_arena_says_how_much_it_has() {
    let arena = HostDevice::unified().arena(4096).unwrap();
    let _held = arena.alloc(4000).unwrap();
    let message = arena.alloc(512).unwrap_err().to_string();
    assert!(message.contains("4096") && message.contains("512"), "{message}");
    // Whole units of this would wrap to one.
    arena.alloc(usize::MAX - 3).unwrap_err();
    HostDevice::unified().arena(usize::MAX).unwrap_err();
}
