//! One suite for every device; a backend adds a fixture.

use terrace_device::host::{HostDevice, POISON};
use terrace_device::{Bytes, BytesMut, Device, Download, StreamKind, Upload};

fn round_trip(device: &dyn Device) {
    let arena = device.arena(1 << 20).unwrap();
    let (compute, up, down) = (
        device.stream(StreamKind::Compute).unwrap(),
        device.stream(StreamKind::Upload).unwrap(),
        device.stream(StreamKind::Download).unwrap(),
    );
    for len in [1, 255, 256, 4097, 100_000] {
        let data: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
        let upload = Upload::start(&*up, data.clone(), arena.alloc(len).unwrap()).unwrap();
        let (region, source) = upload.ready_on(&*compute).unwrap();
        assert_eq!(source.release().unwrap(), data);
        let download = Download::start(&*down, &*compute, region, vec![0u8; len]).unwrap();
        let (_region, back) = download.wait().unwrap();
        assert_eq!(back, data);
    }
    assert_eq!(arena.used(), 0, "every region came back");
}

#[test]
fn host_unified() {
    round_trip(&HostDevice::unified());
}

#[test]
fn host_discrete() {
    round_trip(&HostDevice::discrete());
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

#[test]
fn an_exhausted_arena_says_how_much_it_has() {
    let arena = HostDevice::unified().arena(4096).unwrap();
    let _held = arena.alloc(4000).unwrap();
    let message = arena.alloc(512).unwrap_err().to_string();
    assert!(message.contains("4096") && message.contains("512"), "{message}");
}
