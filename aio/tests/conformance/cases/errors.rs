//! What cannot be done is said, precisely, and harms nothing else.

use crate::rig::{Rig, pattern, segment};
use smallvec::smallvec;
use terrace_aio::{FileId, IoBuf, IoError, IoErrorKind, OpKind, OpenMode, Request, Segment};

fn read_error(rig: &Rig, file: FileId, offset: u64, len: usize) -> IoError {
    rig.engine.submit(Request::read(file, offset, rig.zeroed(len))).wait().unwrap_err()
}

pub fn reading_past_the_end_names_the_range(rig: Rig) {
    let file = rig.create("short", 10_001);
    for (offset, len) in [(0, 10_002), (0, 300_000), (8192, 4096), (10_001, 1), (10_000, 2), (50_000, 4096)] {
        let error = read_error(&rig, file, offset, len);
        assert_eq!(error.kind, IoErrorKind::UnexpectedEof, "{error}");
        assert_eq!(
            (error.offset, error.len, &error.path),
            (offset, len as u64, &rig.path("short")),
            "{error}"
        );
        let text = error.to_string();
        assert!(text.contains("reading") && text.contains("short") && text.contains("10001"), "{text}");
    }
    assert_eq!(rig.read(file, 9000, 1001), [0; 1001]);
}

pub fn unknown_files_are_refused(rig: Rig) {
    let stranger = FileId(4_000_000);
    let closed = rig.create("a", 10);
    rig.engine.close(closed).unwrap();
    for file in [stranger, closed] {
        assert_eq!(read_error(&rig, file, 0, 10).kind, IoErrorKind::Invalid);
        assert_eq!(rig.engine.sync(file).wait().unwrap_err().kind, IoErrorKind::Invalid);
        assert_eq!(rig.engine.len(file).unwrap_err().kind, IoErrorKind::Invalid);
        assert_eq!(rig.engine.close(file).unwrap_err().kind, IoErrorKind::Invalid);
        assert_eq!(rig.engine.path(file), None);
        let told = read_error(&rig, file, 0, 10).to_string();
        assert!(told.contains(&format!("reading file id {}", file.0)), "{told}");
    }
}

pub fn opening_fails_for_missing_and_existing_files(rig: Rig) {
    for mode in [OpenMode::Read, OpenMode::ReadWrite] {
        let error = rig.engine.open(&rig.path("missing"), mode).unwrap_err();
        assert_eq!((error.kind, error.path), (IoErrorKind::NotFound, rig.path("missing")));
    }
    assert!(!rig.engine.exists(&rig.path("missing")));
    assert_eq!(rig.engine.remove(&rig.path("missing")).unwrap_err().kind, IoErrorKind::NotFound);
    let file = rig.create("a", 5);
    rig.write(file, 0, b"hello");
    rig.engine.open(&rig.path("a"), OpenMode::CreateNew { len: 100 }).unwrap_err();
    assert_eq!(rig.read(file, 0, 5), b"hello", "a refused creation changed the file");
    assert_eq!(rig.engine.len(file).unwrap(), 5);
}

pub fn read_only_files_are_not_written(rig: Rig) {
    let file = rig.create("a", 8192);
    rig.engine.close(file).unwrap();
    let file = rig.engine.open(&rig.path("a"), OpenMode::Read).unwrap();
    let mut buf = rig.zeroed(4096);
    buf.fill(1);
    let error = rig.engine.submit(Request::write(file, 0, buf)).wait().unwrap_err();
    assert_eq!(error.kind, IoErrorKind::Denied, "{error}");
    assert_eq!(rig.read(file, 0, 8192), [0; 8192]);
}

pub fn bad_ranges_are_refused(rig: Rig) {
    let file = rig.create("a", 8192);
    let bad: [&[Segment]; 5] = [
        &[segment(file, 0, 0, 101)],
        &[segment(file, 0, 100, 1)],
        &[segment(file, 0, usize::MAX, 2)],
        &[segment(file, u64::MAX - 5, 0, 10)],
        &[segment(file, i64::MAX as u64 - 5, 0, 10)],
    ];
    for segments in bad {
        for kind in [OpKind::Read, OpKind::Write] {
            let request = Request::new(kind, rig.zeroed(100), segments.into());
            assert_eq!(
                rig.engine.submit(request).wait().unwrap_err().kind,
                IoErrorKind::Invalid,
                "{segments:?}"
            );
        }
    }
    let overlapping = smallvec![segment(file, 0, 50, 50), segment(file, 4096, 0, 51)];
    let request = Request::new(OpKind::Read, rig.zeroed(100), overlapping.clone());
    assert_eq!(rig.engine.submit(request).wait().unwrap_err().kind, IoErrorKind::Invalid);
    let request = Request::new(OpKind::Write, rig.zeroed(100), overlapping);
    rig.engine.submit(request).wait().unwrap();
}

pub fn empty_requests_succeed(rig: Rig) {
    let file = rig.create("a", 10);
    let none = Request::new(OpKind::Read, rig.zeroed(10), smallvec![]);
    assert_eq!(rig.engine.submit(none).wait().unwrap().len(), 10);
    for offset in [0, 10, 1000] {
        assert_eq!(rig.engine.submit(Request::read(file, offset, IoBuf::empty())).wait().unwrap().len(), 0);
        assert_eq!(rig.engine.submit(Request::write(file, offset, IoBuf::empty())).wait().unwrap().len(), 0);
    }
    assert_eq!(rig.engine.len(file).unwrap(), 10);
}

pub fn an_error_leaves_the_engine_usable(rig: Rig) {
    let bytes = pattern(100_000, 1);
    let file = rig.create("a", bytes.len() as u64);
    rig.write(file, 0, &bytes);
    for _ in 0..20 {
        let bad = rig.engine.submit(Request::read(file, 50_000, rig.zeroed(200_000)));
        let good = rig.engine.submit(Request::read(file, 0, rig.zeroed(100_000)));
        assert!(bad.wait().is_err());
        assert!(good.wait().unwrap()[..] == bytes[..]);
    }
}

pub fn open_files_are_not_removed(rig: Rig) {
    let file = rig.create("a", 10);
    assert_eq!(rig.engine.remove(&rig.path("a")).unwrap_err().kind, IoErrorKind::Invalid);
    assert_eq!(rig.read(file, 0, 10), [0; 10]);
    rig.engine.close(file).unwrap();
    rig.engine.remove(&rig.path("a")).unwrap();
    assert!(!rig.engine.exists(&rig.path("a")));
    rig.create("a", 20);
}
