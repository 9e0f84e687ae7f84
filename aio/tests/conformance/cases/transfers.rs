//! Bytes arrive where they should, and nowhere else.

use crate::rig::{Rig, pattern, segment};
use smallvec::smallvec;
use terrace_aio::{OpKind, OpenMode, Request, Ticket};

const SIZES: [usize; 12] = [1, 2, 511, 512, 513, 4095, 4096, 4097, 8191, 12_288, 65_537, 100_003];
const OFFSETS: [u64; 8] = [0, 1, 511, 512, 4095, 4096, 4097, 70_001];

pub fn odd_sizes_and_offsets(rig: Rig) {
    let mut shadow = pattern(200_001, 0);
    let file = rig.create("a", shadow.len() as u64);
    rig.write(file, 0, &shadow);
    for (salt, (&size, &offset)) in SIZES.iter().flat_map(|s| OFFSETS.iter().map(move |o| (s, o))).enumerate()
    {
        let bytes = pattern(size, salt as u64 + 1);
        rig.write(file, offset, &bytes);
        let start = offset as usize;
        shadow[start..start + size].copy_from_slice(&bytes);
        assert_eq!(rig.read(file, offset, size), bytes, "{size} bytes at {offset}");
        let (from, len) = (start.saturating_sub(7), size + 14);
        assert_eq!(
            rig.read(file, from as u64, len),
            shadow[from..from + len],
            "around {size} bytes at {offset}"
        );
    }
    assert!(rig.read(file, 0, shadow.len()) == shadow, "bytes elsewhere in the file changed");
    assert_eq!(rig.engine.len(file).unwrap(), shadow.len() as u64);
}

pub fn odd_memory_addresses(rig: Rig) {
    let file = rig.create("a", 100_000);
    for (salt, start) in [1usize, 3, 4, 511, 512, 4095].into_iter().enumerate() {
        let bytes = pattern(70_000, salt as u64);
        let mut buf = rig.zeroed(80_000);
        buf[start..start + bytes.len()].copy_from_slice(&bytes);
        let offset = 4096 * salt as u64 + salt as u64 % 3;
        let segments = smallvec![segment(file, offset, start, bytes.len())];
        rig.engine.submit(Request::new(OpKind::Write, buf, segments.clone())).wait().unwrap();
        assert!(rig.read(file, offset, bytes.len()) == bytes, "written from start {start}");
        let mut buf = rig.zeroed(80_000);
        buf.fill(0xaa);
        let buf = rig.engine.submit(Request::new(OpKind::Read, buf, segments)).wait().unwrap();
        assert!(buf[start..start + bytes.len()] == bytes, "read to start {start}");
        let outside = buf[..start].iter().chain(&buf[start + bytes.len()..]);
        assert!(outside.copied().all(|byte| byte == 0xaa), "bytes outside the segment changed");
    }
}

pub fn segments_over_several_files(rig: Rig) {
    let files = [rig.create("a", 50_000), rig.create("b", 50_000), rig.create("c", 50_000)];
    let bytes = pattern(30_000, 9);
    let segments = smallvec![
        segment(files[0], 4096, 0, 8192),
        segment(files[1], 0, 8192, 4096),
        segment(files[2], 777, 12_288, 10_001),
        segment(files[0], 20_000, 22_289, 0),
        segment(files[1], 30_001, 22_289, 7711),
    ];
    let write = Request::new(OpKind::Write, rig.buf_of(&bytes), segments);
    let read = Request::new(OpKind::Read, rig.zeroed(30_000), write.segments.clone());
    assert_eq!(write.bytes(), 30_000);
    let returned = rig.engine.submit(write).wait().unwrap();
    assert!(returned[..] == bytes[..], "a write gives its buffer back unchanged");
    for s in &read.segments {
        assert!(rig.read(s.file, s.offset, s.len) == bytes[s.start..s.start + s.len], "{s:?}");
    }
    assert!(rig.engine.submit(read).wait().unwrap()[..] == bytes[..]);
    assert_eq!(rig.read(files[0], 0, 4096), [0; 4096]);
}

/// Many segments in no order, on three files: in a rig with three directories each file is in one of its own.
pub fn one_request_over_three_files_in_pieces(rig: Rig) {
    const PIECES: usize = 24;
    const LEN: usize = 7001;
    let names = ["a", "b", "c"];
    let files = names.map(|name| rig.create(name, (PIECES * LEN) as u64));
    let bytes = pattern(PIECES * LEN, 10);
    // 7 and 24 have no common divisor, so every position occurs once.
    let place = |i: usize| (i * 7 % PIECES * LEN) as u64;
    let segments: smallvec::SmallVec<_> =
        (0..PIECES).map(|i| segment(files[i % 3], place(i), i * LEN, LEN)).collect();
    let write = Request::new(OpKind::Write, rig.buf_of(&bytes), segments.clone());
    rig.engine.submit(write).wait().unwrap();
    let read = Request::new(OpKind::Read, rig.zeroed(bytes.len()), segments);
    assert!(rig.engine.submit(read).wait().unwrap()[..] == bytes[..]);
    for (which, file) in files.into_iter().enumerate() {
        let got = rig.read(file, 0, PIECES * LEN);
        for i in 0..PIECES {
            let at = place(i) as usize;
            let range = &got[at..at + LEN];
            let is_written = i % 3 == which;
            let want = if is_written { &bytes[i * LEN..(i + 1) * LEN] } else { &[0; LEN][..] };
            assert!(range == want, "piece {i} in {}", names[which]);
        }
    }
}

pub fn files_in_several_places_at_once(rig: Rig) {
    let names = ["a", "b", "c", "d", "e", "f"];
    let files = names.map(|name| rig.create(name, 100_000));
    let contents: Vec<Vec<u8>> = (0..6).map(|i| pattern(100_000, 20 + i)).collect();
    let part = |file: usize, i: usize| &contents[file][i * 10_000..(i + 1) * 10_000];
    let writes: Vec<Ticket> = (0..60)
        .map(|i| (i % 6, i / 6))
        .map(|(f, i)| rig.engine.submit(Request::write(files[f], i as u64 * 10_000, rig.buf_of(part(f, i)))))
        .collect();
    writes.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
    files.iter().for_each(|&file| drop(rig.engine.sync(file).wait().unwrap()));
    for (i, file) in files.into_iter().enumerate() {
        assert!(rig.read(file, 0, 100_000) == contents[i], "{}", names[i]);
    }
}

pub fn more_blocks_than_the_queue_holds(rig: Rig) {
    let bytes = pattern(4_000_000, 4);
    let file = rig.create("a", 4 * bytes.len() as u64);
    let write = |i: usize| Request::write(file, (i * bytes.len()) as u64, rig.buf_of(&bytes));
    let tickets: Vec<Ticket> = (0..4).map(|i| rig.engine.submit(write(i))).collect();
    tickets.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
    let read = |i: usize| Request::read(file, (i * bytes.len()) as u64, rig.zeroed(bytes.len()));
    let tickets: Vec<Ticket> = (0..4).map(|i| rig.engine.submit(read(i))).collect();
    for ticket in tickets {
        assert!(ticket.wait().unwrap()[..] == bytes[..]);
    }
}

pub fn adjacent_small_writes_keep_their_neighbours(rig: Rig) {
    let bytes = pattern(20_100, 2);
    let file = rig.create("a", bytes.len() as u64);
    let write =
        |(i, part): (usize, &[u8])| rig.engine.submit(Request::write(file, i as u64 * 100, rig.buf_of(part)));
    let tickets: Vec<Ticket> = bytes.chunks(100).enumerate().map(write).collect();
    tickets.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
    assert!(rig.read(file, 0, bytes.len()) == bytes, "a small write lost its neighbour's bytes");
}

pub fn several_threads_at_once(rig: Rig) {
    const SHARE: usize = 150_000;
    let file = rig.create("a", 4 * SHARE as u64);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let rig = &rig;
            scope.spawn(move || {
                let base = (thread * SHARE) as u64;
                for round in 0..8u64 {
                    let bytes = pattern(SHARE, thread as u64 * 100 + round);
                    let write = |(i, part): (usize, &[u8])| {
                        rig.engine.submit(Request::write(file, base + i as u64 * 12_345, rig.buf_of(part)))
                    };
                    let tickets: Vec<Ticket> = bytes.chunks(12_345).enumerate().map(write).collect();
                    tickets.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
                    assert!(rig.read(file, base, SHARE) == bytes, "thread {thread}, round {round}");
                }
            });
        }
    });
}

pub fn files_are_preallocated_with_zeros(rig: Rig) {
    for (name, len) in [("a", 0usize), ("b", 1), ("c", 4096), ("d", 10_001)] {
        let file = rig.create(name, len as u64);
        assert_eq!(rig.engine.len(file).unwrap(), len as u64);
        assert!(rig.read(file, 0, len).iter().all(|&byte| byte == 0));
        assert_eq!(rig.engine.path(file).unwrap(), rig.path(name));
        assert!(rig.engine.exists(&rig.path(name)));
    }
}

pub fn writes_make_a_file_longer_exactly(rig: Rig) {
    let file = rig.create("a", 0);
    let bytes = pattern(40_000, 3);
    let mut end = 0;
    for len in [1usize, 10, 4085, 4096, 1000, 12_000, 96, 8192, 5] {
        rig.write(file, end as u64, &bytes[end..end + len]);
        end += len;
        assert_eq!(rig.engine.len(file).unwrap(), end as u64);
        assert!(rig.read(file, 0, end) == bytes[..end], "after growing to {end}");
    }
    rig.write(file, end as u64 + 5000, &[9]);
    assert_eq!(rig.engine.len(file).unwrap(), end as u64 + 5001);
    assert!(rig.read(file, end as u64, 5000).iter().all(|&byte| byte == 0), "a hole reads as zeros");
}

pub fn large_and_small_writes_extend_together(rig: Rig) {
    for round in 0..10 {
        let bytes = pattern(40_000, round);
        let file = rig.create(&format!("{round}"), 1000);
        let cuts = [0usize, 1000, 1100, 4096, 20_480, 20_500, 40_000];
        let write = |pair: &[usize]| {
            rig.engine.submit(Request::write(file, pair[0] as u64, rig.buf_of(&bytes[pair[0]..pair[1]])))
        };
        let tickets: Vec<Ticket> = cuts.windows(2).map(write).collect();
        tickets.into_iter().for_each(|ticket| drop(ticket.wait().unwrap()));
        assert_eq!(rig.engine.len(file).unwrap(), 40_000);
        assert!(rig.read(file, 0, 40_000) == bytes, "round {round}");
    }
}

pub fn what_was_written_is_there_after_reopening(rig: Rig) {
    let bytes = pattern(9999, 8);
    let file = rig.create("a", 0);
    rig.write(file, 0, &bytes);
    rig.engine.close(file).unwrap();
    for mode in [OpenMode::Read, OpenMode::ReadWrite] {
        let file = rig.engine.open(&rig.path("a"), mode).unwrap();
        assert_eq!(rig.engine.len(file).unwrap(), 9999);
        assert!(rig.read(file, 0, 9999) == bytes);
        rig.engine.close(file).unwrap();
    }
}
