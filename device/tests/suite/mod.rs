//! What every device must do; a backend adds a fixture.

use terrace_device::{Device, Download, StreamKind, Upload};

/// Every property below.
pub fn all(device: &dyn Device) {
    round_trip(device);
    parts_alone(device);
    pieces_in_order(device);
    many_in_flight(device);
    dropped_transfers_settle(device);
    events_fire_in_order(device);
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 7 + seed * 31) % 251) as u8).collect()
}

/// What goes up comes down again, at sizes around every alignment.
pub fn round_trip(device: &dyn Device) {
    let arena = device.arena(1 << 20).unwrap();
    let (compute, up, down) = (
        device.stream(StreamKind::Compute).unwrap(),
        device.stream(StreamKind::Upload).unwrap(),
        device.stream(StreamKind::Download).unwrap(),
    );
    for len in [1, 255, 256, 4097, 100_000] {
        let data = pattern(len, 0);
        let upload = Upload::start(&*up, data.clone(), arena.alloc(len).unwrap()).unwrap();
        let (region, source) = upload.ready_on(&*compute).unwrap();
        assert_eq!(source.release().unwrap(), data);
        let download = Download::start(&*down, &*compute, region, vec![0u8; len]).unwrap();
        let (_region, back) = download.wait().unwrap();
        assert_eq!(back, data);
    }
    assert_eq!(arena.used(), 0, "every region came back");
}

/// Transfers do not disturb one another.
/// Parts go to the same places at the other end, and what lies between stays as it was.
fn parts_alone(device: &dyn Device) {
    let arena = device.arena(1 << 16).unwrap();
    let [up, compute, down] = [StreamKind::Upload, StreamKind::Compute, StreamKind::Download]
        .map(|kind| device.stream(kind).unwrap());
    let (first, second) = (pattern(1000, 1), pattern(1000, 2));
    let whole = Upload::start(&*up, first.clone(), arena.alloc(1000).unwrap()).unwrap();
    let (region, _source) = whole.ready_on(&*compute).unwrap();
    let parts = [0..3, 3..4, 500..777, 999..1000];
    let upload = Upload::start_parts(&*up, second.clone(), region, &parts).unwrap();
    let (region, _source) = upload.ready_on(&*compute).unwrap();
    let blank = vec![7; 1000];
    let download = Download::start_parts(&*down, &*compute, region, blank, &[1..600, 998..1000]).unwrap();
    let (_, found) = download.wait().unwrap();
    for (at, &byte) in found.iter().enumerate() {
        let is_new = parts.iter().any(|part| part.contains(&at));
        let there = if is_new { second[at] } else { first[at] };
        let comes = (1..600).contains(&at) || at >= 998;
        assert_eq!(byte, if comes { there } else { 7 }, "byte {at}");
    }
    let nothing = Upload::start_parts(&*up, pattern(8, 3), arena.alloc(8).unwrap(), &[]).unwrap();
    nothing.ready_on(&*compute).unwrap().1.release().unwrap();
}

/// One region and many places in host memory, one after the other.
fn pieces_in_order(device: &dyn Device) {
    let arena = device.arena(1 << 16).unwrap();
    let [up, compute, down] = [StreamKind::Upload, StreamKind::Compute, StreamKind::Download]
        .map(|kind| device.stream(kind).unwrap());
    let bytes = pattern(1000, 3);
    let cut = |lengths: &[usize]| {
        let mut at = 0;
        let piece = |&length: &usize| {
            at += length;
            bytes[at - length..at].to_vec()
        };
        lengths.iter().map(piece).collect::<Vec<_>>()
    };
    for (there, back) in [
        (&[1000][..], &[1, 998, 1][..]),
        (&[256, 256, 488], &[500, 500]),
        (&[0, 999, 0, 1], &[1000]),
        (&[], &[0, 0]),
    ] {
        let upload = Upload::start_pieces(&*up, cut(there), arena.alloc(1000).unwrap()).unwrap();
        let (region, source) = upload.ready_on(&*compute).unwrap();
        let blank = back.iter().map(|&length| vec![7; length]).collect();
        let download = Download::start_pieces(&*down, &*compute, region, blank).unwrap();
        let (region, found) = download.wait().unwrap();
        assert!(found == cut(back) && region.len() >= 1000);
        assert_eq!(source.release().unwrap(), cut(there));
    }
}

fn many_in_flight(device: &dyn Device) {
    let arena = device.arena(1 << 20).unwrap();
    let compute = device.stream(StreamKind::Compute).unwrap();
    let up = device.stream(StreamKind::Upload).unwrap();
    let down = device.stream(StreamKind::Download).unwrap();
    let start = |seed| Upload::start(&*up, pattern(5000, seed), arena.alloc(5000).unwrap()).unwrap();
    let uploads: Vec<_> = (0..16).map(start).collect();
    let ready: Vec<_> = uploads.into_iter().map(|upload| upload.ready_on(&*compute).unwrap()).collect();
    let mut downloads = Vec::new();
    for (region, source) in ready {
        downloads.push((
            Download::start(&*down, &*compute, region, vec![0u8; 5000]).unwrap(),
            source.release().unwrap(),
        ));
    }
    for (seed, (download, source)) in downloads.into_iter().enumerate().rev() {
        assert_eq!(source, pattern(5000, seed));
        assert_eq!(download.wait().unwrap().1, source);
    }
}

/// A transfer that nobody waits for gives its memory back only when it is done.
fn dropped_transfers_settle(device: &dyn Device) {
    let arena = device.arena(64 << 10).unwrap();
    let up = device.stream(StreamKind::Upload).unwrap();
    for seed in 0..32 {
        drop(Upload::start(&*up, pattern(60_000, seed), arena.alloc(60_000).unwrap()).unwrap());
    }
    assert_eq!(arena.used(), 0);
}

/// An event covers all that was enqueued before it, and a stream that waits for it.
fn events_fire_in_order(device: &dyn Device) {
    let arena = device.arena(1 << 20).unwrap();
    let up = device.stream(StreamKind::Upload).unwrap();
    let other = device.stream(StreamKind::Download).unwrap();
    let early = up.record().unwrap();
    let upload = Upload::start(&*up, pattern(100_000, 1), arena.alloc(100_000).unwrap()).unwrap();
    let late = up.record().unwrap();
    other.wait(&*late).unwrap();
    let after = other.record().unwrap();
    after.synchronize().unwrap();
    assert!(early.is_done() && late.is_done() && after.is_done());
    other.synchronize().unwrap();
    up.synchronize().unwrap();
    drop(upload);
}
