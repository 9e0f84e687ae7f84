//! Failures of real file systems and drives, on small ones made for the purpose: the error says what happened to which
//! range, what is not concerned goes on, and the engine stays usable.
//!
//! They take root and loop devices; without them a test says so and passes. `faults` has the same on simulated disks.

#[path = "support/loop_disk.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod loop_disk;

use loop_disk::LoopDisk;
use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use terrace_aio::engine::{EngineConfig, ThreadsEngine, UringEngine};
use terrace_aio::{FileId, IoBuf, IoEngine, IoError, IoErrorKind, OpenMode, Request};

const DISK_BYTES: u64 = 16 << 20;

/// Runs a check with every real engine, direct and cached, each on a fresh disk with sectors of `sector_bytes`.
fn on_every_engine(sector_bytes: u32, check: fn(&dyn IoEngine, &mut LoopDisk)) {
    for direct in [true, false] {
        let config = EngineConfig { block_bytes: 64 << 10, direct, ..EngineConfig::default() };
        let mut engines: Vec<Arc<dyn IoEngine>> = vec![Arc::new(ThreadsEngine::new(&config).unwrap())];
        match UringEngine::new(&config) {
            Ok(engine) => engines.push(Arc::new(engine)),
            Err(error) => println!("skipped: {error}"),
        }
        #[cfg(feature = "tokio_uring")]
        match terrace_aio::engine::TokioUringEngine::new(&config) {
            Ok(engine) => engines.push(Arc::new(engine)),
            Err(error) => println!("skipped: {error}"),
        }
        for engine in engines {
            let mut disk = match LoopDisk::new(DISK_BYTES, sector_bytes) {
                Ok(disk) => disk,
                Err(error) => {
                    println!("skipped: no file system for this can be made here: {error}");
                    return;
                }
            };
            println!("{} / {}", engine.name(), if direct { "direct" } else { "cached" });
            check(&*engine, &mut disk);
        }
    }
}

fn pattern(len: usize, salt: usize) -> Vec<u8> {
    (0..len).map(|i| ((i + salt * 31) % 251) as u8 ^ (i >> 12) as u8).collect()
}

fn write(engine: &dyn IoEngine, file: FileId, offset: u64, bytes: &[u8]) -> Result<(), IoError> {
    let mut buf = IoBuf::zeroed(bytes.len());
    buf.copy_from_slice(bytes);
    engine.submit(Request::write(file, offset, buf)).wait().map(drop)
}

fn read(engine: &dyn IoEngine, file: FileId, offset: u64, len: usize) -> Result<Vec<u8>, IoError> {
    let mut buf = IoBuf::zeroed(len);
    buf.fill(0xee);
    engine.submit(Request::read(file, offset, buf)).wait().map(|buf| buf.to_vec())
}

/// A file with `bytes` in it, durable.
fn filled(engine: &dyn IoEngine, path: &Path, bytes: &[u8]) -> FileId {
    let file = engine.open(path, OpenMode::CreateNew { len: bytes.len() as u64 }).unwrap();
    write(engine, file, 0, bytes).unwrap();
    engine.sync(file).wait().unwrap();
    file
}

/// The file `a` on a disk, with a pattern in it.
fn file_a(engine: &dyn IoEngine, disk: &LoopDisk, len: usize, salt: usize) -> (PathBuf, Vec<u8>, FileId) {
    let (path, bytes) = (disk.path().join("a"), pattern(len, salt));
    let file = filled(engine, &path, &bytes);
    (path, bytes, file)
}

/// Empties the page cache of a file: what it holds would be read from there.
fn forget_cached(path: &Path) {
    let file = std::fs::File::open(path).unwrap();
    // SAFETY: a system call on an open descriptor that touches no memory of ours.
    let status = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(status, 0);
}

/// Starts programs for as long as it lives: until a child runs its program it holds a copy of every open descriptor.
struct Starts(Arc<AtomicBool>);

impl Starts {
    fn programs() -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = is_over.clone();
        std::thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                let _ = std::process::Command::new("true").status();
            }
        });
        Self(is_over)
    }
}

impl Drop for Starts {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_file_that_does_not_fit_is_refused_and_leaves_nothing() {
    on_every_engine(512, |engine, disk| {
        let _others = Starts::programs();
        let path = disk.path().join("large");
        for _ in 0..10 {
            let error = engine.open(&path, OpenMode::CreateNew { len: 4 * DISK_BYTES }).unwrap_err();
            assert_eq!((error.kind, error.len), (IoErrorKind::NoSpace, 4 * DISK_BYTES), "{error}");
            assert_eq!(error.path, path);
            assert!(!path.exists(), "a file that did not fit stays behind");
        }
        // All of the space is there again.
        let file = engine.open(&path, OpenMode::CreateNew { len: DISK_BYTES / 2 }).unwrap();
        assert_eq!(engine.len(file).unwrap(), DISK_BYTES / 2);
    });
}

#[test]
fn space_that_runs_out_in_the_middle_of_a_write_names_the_range() {
    on_every_engine(512, |engine, disk| {
        let bytes = pattern(1 << 20, 1);
        let other = filled(engine, &disk.path().join("other"), &bytes);
        let path = disk.path().join("sparse");
        OpenOptions::new().write(true).create_new(true).open(&path).unwrap().set_len(64 << 20).unwrap();
        let sparse = engine.open(&path, OpenMode::ReadWrite).unwrap();
        write(engine, sparse, 4096, &bytes).unwrap();
        // Off the alignment, so that the edges are part of it.
        let (offset, len) = ((8 << 20) + 100, 24 << 20);
        let error = write(engine, sparse, offset, &pattern(len, 2)).unwrap_err();
        let named = (error.kind, error.offset, error.len, error.path.clone());
        assert_eq!(named, (IoErrorKind::NoSpace, offset, len as u64, path.clone()), "{error}");
        assert!(error.to_string().contains("free space"), "the message says what to do: {error}");
        assert!(read(engine, other, 0, bytes.len()).unwrap() == bytes, "another file was damaged");
        assert!(read(engine, sparse, 4096, bytes.len()).unwrap() == bytes, "the file was damaged elsewhere");
        // What is allocated already can be written on a full disk.
        let newer = pattern(1 << 20, 3);
        write(engine, other, 0, &newer).unwrap();
        engine.sync(other).wait().unwrap();
        assert!(read(engine, other, 0, newer.len()).unwrap() == newer);
        engine.punch_hole(sparse, 0, 64 << 20).unwrap();
        write(engine, sparse, offset, &bytes).unwrap();
        assert!(read(engine, sparse, offset, bytes.len()).unwrap() == bytes);
    });
}

#[test]
fn a_file_removed_by_somebody_else_stays_usable() {
    on_every_engine(4096, |engine, disk| {
        let dir = disk.path().join("dir");
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("a");
        let mut bytes = pattern(300_001, 4);
        let file = filled(engine, &path, &bytes);
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(read(engine, file, 0, bytes.len()).unwrap() == bytes);
        write(engine, file, 5000, &[7; 100_000]).unwrap();
        bytes[5000..105_000].fill(7);
        engine.sync(file).wait().unwrap();
        assert!(read(engine, file, 0, bytes.len()).unwrap() == bytes);
        for mode in [OpenMode::Read, OpenMode::ReadWrite, OpenMode::CreateNew { len: 10 }] {
            let error = engine.open(&path, mode).unwrap_err();
            assert_eq!((error.kind, &error.path), (IoErrorKind::NotFound, &path), "{mode:?}: {error}");
        }
        engine.close(file).unwrap();
    });
}

#[test]
fn a_file_system_that_was_unmounted_stays_usable_through_open_files() {
    on_every_engine(512, |engine, disk| {
        let (path, bytes, file) = file_a(engine, disk, 300_001, 5);
        disk.unmount().unwrap();
        assert!(read(engine, file, 0, bytes.len()).unwrap() == bytes);
        write(engine, file, 1, &bytes[1..]).unwrap();
        engine.sync(file).wait().unwrap();
        assert_eq!(engine.open(&path, OpenMode::Read).unwrap_err().kind, IoErrorKind::NotFound);
        engine.close(file).unwrap();
    });
}

#[test]
fn a_file_truncated_by_somebody_else_ends_where_it_ends() {
    on_every_engine(512, |engine, disk| {
        let (path, bytes, file) = file_a(engine, disk, 500_000, 6);
        for end in [400_001, 131_072, 65_537, 4096, 4095, 0] {
            OpenOptions::new().write(true).open(&path).unwrap().set_len(end).unwrap();
            for (offset, len) in [(0, 500_000), (end.saturating_sub(1), 2), (0, end as usize + 1)] {
                let error = read(engine, file, offset, len).unwrap_err();
                let named = (error.kind, error.offset, error.len);
                assert_eq!(named, (IoErrorKind::UnexpectedEof, offset, len as u64), "{error}");
                let said = format!("the file ends at byte {end}");
                assert_eq!(error.detail, said, "asked for {len} bytes at {offset}");
            }
            assert!(read(engine, file, 0, end as usize).unwrap() == bytes[..end as usize]);
            assert_eq!(engine.len(file).unwrap(), end);
        }
        write(engine, file, 0, &bytes).unwrap();
        assert!(read(engine, file, 0, bytes.len()).unwrap() == bytes, "after growing again");
    });
}

#[test]
fn a_read_only_file_system_is_read_but_not_written() {
    on_every_engine(4096, |engine, disk| {
        let (path, bytes, file) = file_a(engine, disk, 200_001, 7);
        let other = disk.path().join("b");
        let empty = engine.open(&other, OpenMode::CreateNew { len: 0 }).unwrap();
        [file, empty].into_iter().for_each(|file| engine.close(file).unwrap());
        let file = engine.open(&path, OpenMode::Read).unwrap();
        disk.make_read_only().unwrap();
        for (path, mode) in
            [(&path, OpenMode::ReadWrite), (&disk.path().join("new"), OpenMode::CreateNew { len: 10 })]
        {
            let error = engine.open(path, mode).unwrap_err();
            assert_eq!((error.kind, &error.path), (IoErrorKind::Denied, path), "{mode:?}: {error}");
            assert!(error.to_string().contains("read-only"), "{error}");
        }
        assert_eq!(engine.remove(&other).unwrap_err().kind, IoErrorKind::Denied);
        assert!(read(engine, file, 0, bytes.len()).unwrap() == bytes);
    });
}

#[test]
fn a_file_system_that_turns_read_only_fails_writes_and_goes_on_reading() {
    on_every_engine(512, |engine, disk| {
        let (path, bytes, file) = file_a(engine, disk, 200_001, 8);
        disk.fail_file_system().unwrap();
        let error = write(engine, file, 4096, &pattern(100_000, 9)).unwrap_err();
        let named = (error.kind, error.offset, error.len, &error.path);
        assert_eq!(named, (IoErrorKind::Denied, 4096, 100_000, &path), "{error}");
        assert!(error.detail.contains("Read-only"), "{error}");
        assert!(read(engine, file, 0, bytes.len()).unwrap() == bytes);
    });
}

#[test]
fn a_drive_with_4096_byte_sectors_is_exact_at_every_offset() {
    on_every_engine(4096, |engine, disk| {
        let (_, mut shadow, file) = file_a(engine, disk, 150_001, 10);
        let facts = engine.file_facts(file).unwrap();
        if facts.is_direct {
            assert_eq!(facts.offset_align, 4096);
        }
        for (salt, offset) in [0usize, 1, 511, 512, 513, 2048, 4095, 4096, 4097, 6144].into_iter().enumerate()
        {
            for len in [1usize, 511, 512, 1024, 4095, 4096, 4097, 8192, 66_048, 100_001] {
                let bytes = pattern(len, 20 + salt);
                write(engine, file, offset as u64, &bytes).unwrap();
                shadow[offset..offset + len].copy_from_slice(&bytes);
                assert!(read(engine, file, offset as u64, len).unwrap() == bytes, "{len} bytes at {offset}");
            }
        }
        assert!(read(engine, file, 0, shadow.len()).unwrap() == shadow);
    });
}

#[test]
fn a_drive_that_lost_its_sectors_fails_what_touches_them() {
    const PART: usize = 256 << 10;
    on_every_engine(512, |engine, disk| {
        let (path, bytes, file) = file_a(engine, disk, 40 * PART, 11);
        forget_cached(&path);
        let image = OpenOptions::new().write(true).open(disk.image()).unwrap();
        image.set_len(DISK_BYTES / 2).unwrap();
        let mut outcomes = [0, 0];
        for (i, part) in bytes.chunks(PART).enumerate() {
            let offset = (i * PART) as u64;
            match read(engine, file, offset, PART) {
                Ok(got) => {
                    assert!(got == part, "part {i} was read and is wrong");
                    outcomes[0] += 1;
                }
                Err(error) => {
                    let named = (error.kind, error.offset, error.len, &error.path);
                    assert_eq!(named, (IoErrorKind::Device, offset, PART as u64, &path), "{error}");
                    assert!(error.to_string().contains("kernel log"), "the message says what to do: {error}");
                    outcomes[1] += 1;
                }
            }
        }
        println!("{} parts were read, {} failed", outcomes[0], outcomes[1]);
        assert!(outcomes.iter().all(|&count| count > 5), "{outcomes:?}: the test needs parts of both kinds");
        image.set_len(DISK_BYTES).unwrap();
        let last = bytes.len() - PART;
        write(engine, file, last as u64, &bytes[last..]).unwrap();
        assert!(read(engine, file, last as u64, PART).unwrap() == bytes[last..], "the drive works again");
    });
}
