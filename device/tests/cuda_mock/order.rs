//! Streams, events, and what a missing wait looks like.

use crate::{calls, scene, suite};
use std::ptr::NonNull;
use std::sync::Arc;
use terrace_device::cuda::{CudaDevice, PinnedUse};
use terrace_device::host::HostMemory;
use terrace_device::{Bytes, BytesMut, Device, Download, Event, StreamKind, Upload};

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn conformance() {
    for seed in ["1", "2", "3"] {
        let settings = [("TERRACE_MOCK_SEED", seed), ("TERRACE_MOCK_DELAY_US", "300")];
        scene("order::conformance", &settings, || {
            let device = CudaDevice::open(0).unwrap();
            assert!(!device.unified());
            suite::all(&*device);
            assert!(calls("cuMemcpyHtoDAsync_v2") > 50, "copies went through the driver");
        });
    }
}

/// Uploads `rounds` patterns from pinned memory and downloads each on another stream, which waits or not; how many
/// came back whole.
fn rounds_intact(rounds: usize, wait: bool) -> usize {
    const BYTES: usize = 4096;
    let device = CudaDevice::open(0).unwrap();
    let arena = device.arena(BYTES).unwrap();
    let (up, down) =
        (device.stream(StreamKind::Upload).unwrap(), device.stream(StreamKind::Download).unwrap());
    let mut source = device.pinned_memory(BYTES, PinnedUse::Upload).unwrap();
    let mut back = device.pinned_memory(BYTES, PinnedUse::Download).unwrap();
    let mut region = arena.alloc(BYTES).unwrap();
    let mut intact = 0;
    for round in 0..rounds {
        source.fill(round as u8 + 1);
        // SAFETY: source, region and destination outlive the synchronization of both streams below; where the streams are
        // not ordered, the mix of old and new bytes is the point of the test.
        unsafe {
            up.copy(Bytes::from_host(&source), region.bytes_mut()).unwrap();
            if wait {
                down.wait(&*up.record().unwrap()).unwrap();
            }
            down.copy(region.bytes(), BytesMut::from_host(&mut back)).unwrap();
        }
        up.synchronize().unwrap();
        down.synchronize().unwrap();
        intact += usize::from(back[..] == source[..]);
    }
    intact
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_missing_wait_shows_and_a_wait_helps() {
    scene("order::a_missing_wait_shows_and_a_wait_helps", &[("TERRACE_MOCK_DELAY_US", "1000")], || {
        assert_eq!(rounds_intact(40, true), 40);
        let intact = rounds_intact(40, false);
        assert!(intact < 35, "{intact} of 40 rounds are right without a wait");
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn a_copy_is_not_done_before_its_event() {
    scene("order::a_copy_is_not_done_before_its_event", &[("TERRACE_MOCK_DELAY_US", "300000")], || {
        let device = CudaDevice::open(0).unwrap();
        let arena = device.arena(1 << 16).unwrap();
        let (up, down) =
            (device.stream(StreamKind::Upload).unwrap(), device.stream(StreamKind::Download).unwrap());
        let mut source = device.pinned_memory(64, PinnedUse::Upload).unwrap();
        let mut back = device.pinned_memory(64, PinnedUse::Download).unwrap();
        let mut region = arena.alloc(64).unwrap();
        source.fill(7);
        // SAFETY: all three outlive the events waited for below; the early write to the source is the point.
        let early = unsafe {
            up.copy(Bytes::from_host(&source), region.bytes_mut()).unwrap();
            up.record().unwrap()
        };
        assert!(!early.is_done(), "the copy has yet to begin");
        source.fill(8);
        early.synchronize().unwrap();
        assert!(early.is_done());
        // SAFETY: as above.
        unsafe { down.copy(region.bytes(), BytesMut::from_host(&mut back)).unwrap() };
        assert!(!down.record().unwrap().is_done());
        down.synchronize().unwrap();
        assert_eq!(
            back[..],
            [8u8; 64],
            "a source that is used again too early is copied with its new contents"
        );
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn events_are_used_again() {
    scene("order::events_are_used_again", &[], || {
        let device = CudaDevice::open(0).unwrap();
        let arena = device.arena(1 << 16).unwrap();
        let (compute, up, down) = (
            device.stream(StreamKind::Compute).unwrap(),
            device.stream(StreamKind::Upload).unwrap(),
            device.stream(StreamKind::Download).unwrap(),
        );
        let step = || {
            let upload = Upload::start(&*up, vec![1u8; 100], arena.alloc(100).unwrap()).unwrap();
            let (region, source) = upload.ready_on(&*compute).unwrap();
            let download = Download::start(&*down, &*compute, region, vec![0u8; 100]).unwrap();
            assert_eq!(download.wait().unwrap().1, source.release().unwrap());
        };
        step();
        let made = device.events_made();
        (0..200).for_each(|_| step());
        assert_eq!(device.events_made(), made, "later steps make no event");
        assert_eq!(calls("cuEventCreate"), made as i64);
        // An event that is held is not handed out.
        let held: Vec<Arc<dyn Event>> = (0..50).map(|_| up.record().unwrap()).collect();
        held.iter().for_each(|event| event.synchronize().unwrap());
        assert!(device.events_made() >= 50);
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn pinned_pages_are_copied_without_staging() {
    scene("order::pinned_pages_are_copied_without_staging", &[], || {
        let device = CudaDevice::open(0).unwrap();
        let arena = device.arena(1 << 20).unwrap();
        let up = device.stream(StreamKind::Upload).unwrap();
        let memory = HostMemory::new(1 << 20).unwrap();
        let mut region = arena.alloc(4096).unwrap();
        let mut upload = |from: NonNull<u8>| {
            // SAFETY: the range is within the mapping, which outlives the synchronization.
            unsafe {
                let source = std::slice::from_raw_parts(from.as_ptr(), 4096);
                up.copy(Bytes::from_host(source), region.bytes_mut()).unwrap();
            }
            up.synchronize().unwrap();
            calls("unpinned")
        };
        assert_eq!(upload(memory.base()), 1);
        // SAFETY: the mapping outlives the value.
        let pinned = unsafe { device.pin(memory.base(), memory.bytes()) }.unwrap();
        assert!(pinned.is_some());
        // SAFETY: within the mapping.
        assert_eq!(upload(unsafe { memory.base().add(8192) }), 1, "no further staging");
        // SAFETY: the mapping outlives the value.
        let again = unsafe { device.pin(memory.base(), 4096) }.unwrap_err().to_string();
        assert!(again.contains("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)"), "{again}");
        drop(pinned);
        assert_eq!(upload(memory.base()), 2, "unpinned when dropped");
        // SAFETY: nothing is at risk in an empty range.
        assert!(!unsafe { device.pin(memory.base(), 0) }.unwrap().is_some());
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn every_thread_may_use_the_device() {
    scene("order::every_thread_may_use_the_device", &[("TERRACE_MOCK_DEVICES", "2")], || {
        let devices = [CudaDevice::open(0).unwrap(), CudaDevice::open(1).unwrap()];
        std::thread::scope(|threads| {
            for thread in 0..6 {
                let device = &devices[thread % 2];
                threads.spawn(move || suite::round_trip(&**device));
            }
        });
        // One thread, both devices: what was current is current again.
        let outer = devices[0].enter().unwrap();
        suite::round_trip(&*devices[1]);
        assert_eq!(devices[0].enter().map(|_| ()).map_err(|e| e.to_string()), Ok(()));
        drop(outer);
        let [first, second] = devices;
        drop(first);
        suite::round_trip(&*second);
    });
}

#[test]
#[ignore = "needs the mock driver: cargo xtask cuda-mock"]
fn timed_events_measure() {
    scene("order::timed_events_measure", &[("TERRACE_MOCK_DELAY_US", "20000")], || {
        let device = CudaDevice::open(0).unwrap();
        let arena = device.arena(4096).unwrap();
        let stream = device.compute_stream();
        let mut region = arena.alloc(64).unwrap();
        let start = stream.record_timed().unwrap();
        for value in 0..8 {
            // SAFETY: the region outlives the wait in `since`.
            unsafe { stream.fill(region.bytes_mut(), value).unwrap() };
        }
        let end = stream.record_timed().unwrap();
        let (forth, none) = (end.since(&start).unwrap(), start.since(&start).unwrap());
        assert!(none.is_zero() && forth.as_millis() >= 2, "{forth:?}");
    });
}
