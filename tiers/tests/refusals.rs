//! What a store refuses on real file systems, and what it says.

use std::ffi::{CStr, CString};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use terrace_aio::IoEngine;
use terrace_aio::engine::{EngineChoice, EngineConfig, open_default};
use terrace_tiers::{
    Access, BlobKey, BlobKind, BlobSpec, DiskStore, Generation, GroupSpec, Lease, Scratch, StoreSpec,
    StoreView, Striping, TierError, free_space,
};

const CHUNK: u64 = 1 << 17;
/// Where the first stripe begins in a file.
const HEADER_BYTES: u64 = 4096;

fn engine() -> Arc<dyn IoEngine> {
    open_default(&EngineConfig { choice: EngineChoice::Threads, ..EngineConfig::default() }).unwrap()
}

/// 6 bytes an element, and two generations: 2.6 MiB, so that three directories all hold data.
fn spec(elements: u64) -> StoreSpec {
    let kind = |(kind, element_bytes)| BlobSpec::plain(kind, element_bytes);
    StoreSpec {
        groups: vec![
            GroupSpec { name: "layers.0".into(), elements },
            GroupSpec { name: "head".into(), elements: 1 << 16 },
        ],
        kinds: [(BlobKind::Weight, 2), (BlobKind::Moment1, 4)].map(kind).to_vec(),
        chunk_elements: CHUNK,
        generations: 2,
        identity: "{}".into(),
    }
}

fn small() -> StoreSpec {
    spec(CHUNK + (1 << 15))
}

fn dirs(root: &Path, names: &[&str]) -> Vec<PathBuf> {
    names.iter().map(|name| root.join(name)).collect()
}

fn step(store: &mut DiskStore, step: u64) -> Result<(), TierError> {
    let spec = store.spec().clone();
    for group in 0..spec.groups.len() {
        for kind in &spec.kinds {
            for chunk in 0..spec.chunks(group) {
                let mut lease = Lease::standalone(kind.bytes(spec.chunk_len(group, chunk) as u64) as usize);
                lease.fill(step as u8 + 1);
                store.write(BlobKey { group, kind: kind.kind }, chunk, lease)?;
            }
        }
    }
    store.commit(step, &[])
}

/// Reads whole blobs and checks them.
fn verify(store: &DiskStore) -> Result<(), TierError> {
    let (spec, expected) = (store.spec(), store.committed().step as u8 + 1);
    for group in 0..spec.groups.len() {
        for kind in &spec.kinds {
            let lease = Lease::standalone(kind.bytes(spec.groups[group].elements) as usize);
            let key = BlobKey { group, kind: kind.kind };
            let bytes = store.read(key, 0..spec.chunks(group), Generation::Live, lease)?.wait()?;
            assert!(bytes.iter().all(|&b| b == expected), "{key:?}");
        }
    }
    Ok(())
}

/// The second was said to be in use by another process.
#[test]
fn a_directory_that_is_given_twice() {
    let root = tempfile::tempdir().unwrap();
    let io = engine();
    for second in ["a", "b/../a"] {
        std::fs::create_dir_all(root.path().join("b")).unwrap();
        let dirs = dirs(root.path(), &["a", "b", second]);
        let error = DiskStore::create(&io, &Striping::equal(&dirs), small()).unwrap_err().to_string();
        let words =
            format!("{} is the same directory as {}; give it once", dirs[2].display(), dirs[0].display());
        assert!(error.contains(&words), "{error}");
    }
}

/// Its bytes wrapped, and memory for its chunks was asked for.
#[test]
fn scratch_that_no_file_holds() {
    let root = tempfile::tempdir().unwrap();
    for (count, bytes) in [(usize::MAX, 4096), (usize::MAX, 0), (1 << 52, 4097), (2, usize::MAX)] {
        let striping = Striping::equal(&dirs(root.path(), &["a"]));
        let error = Scratch::create(&engine(), &striping, "scratch.bin", count, bytes).unwrap_err();
        assert!(error.to_string().contains("larger than any file"), "{error}");
    }
}

/// Makes a store with steps 0 and 1 and closes it.
fn made(dirs: &[PathBuf]) {
    let mut store = DiskStore::create(&engine(), &Striping::equal(dirs), small()).unwrap();
    step(&mut store, 0).unwrap();
    step(&mut store, 1).unwrap();
}

fn reopened(dirs: &[PathBuf]) -> Result<u64, TierError> {
    let store = DiskStore::open(&engine(), dirs)?;
    verify(&store)?;
    Ok(store.committed().step)
}

/// Leaves what a process does that is killed before its store's first commit; one that ends otherwise leaves nothing.
fn killed(dirs: &[PathBuf]) {
    let store = DiskStore::create(&engine(), &Striping::equal(dirs), small()).unwrap();
    let files = dirs.iter().flat_map(|dir| ["manifest.bin", "state.bin"].map(|name| dir.join(name)));
    let files: Vec<PathBuf> = files.filter(|file| file.exists()).collect();
    let kept = |file: &PathBuf| file.with_extension("kept");
    files.iter().for_each(|file| std::fs::hard_link(file, kept(file)).unwrap());
    drop(store);
    for file in &files {
        assert!(!file.exists(), "nothing was committed in {}", file.display());
        std::fs::rename(kept(file), file).unwrap();
    }
}

fn created(dirs: &[PathBuf]) -> TierError {
    DiskStore::create(&engine(), &Striping::equal(dirs), small()).map(drop).expect_err("refused")
}

/// The message of an error, which has all of `parts`.
#[track_caller]
fn says(error: &TierError, parts: &[&str]) {
    let text = error.to_string();
    println!("{text}");
    for part in parts {
        assert!(text.contains(part), "{part:?} is in: {text}");
    }
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
    file.sync_all().unwrap();
}

/// Offsets of the two manifest slots, from its header.
fn slots(manifest: &Path) -> [u64; 2] {
    let mut words = [0; 16];
    File::open(manifest).unwrap().read_exact_at(&mut words, 24).unwrap();
    let word = |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().unwrap());
    let first = 4096 + word(0).next_multiple_of(4096);
    [first, first + word(8)]
}

#[test]
fn a_second_handle_is_refused_until_the_first_is_gone() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a", "b"]);
    let store = DiskStore::create(&engine(), &Striping::equal(&dirs), small()).unwrap();
    for error in [created(&dirs), created(&dirs[1..]), reopened(&dirs).unwrap_err()] {
        assert!(matches!(error, TierError::Locked { .. }), "{error}");
        says(&error, &["in use", "terrace.lock"]);
    }
    drop(store);
    made(&dirs);
}

#[test]
fn a_second_process_is_refused() {
    const DIR: &str = "TERRACE_TEST_REFUSALS_DIR";
    if let Some(dir) = std::env::var_os(DIR) {
        match DiskStore::open(&engine(), &[dir.into()]) {
            Ok(_) => println!("opened"),
            Err(error) => println!("refused: {error}"),
        }
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a"]);
    made(&dirs);
    let other = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "a_second_process_is_refused", "--nocapture"]).env(DIR, &dirs[0]);
        String::from_utf8(command.output().unwrap().stdout).unwrap()
    };
    let store = DiskStore::open(&engine(), &dirs).unwrap();
    let text = other();
    assert!(text.contains("refused:") && text.contains("in use"), "{text}");
    drop(store);
    let text = other();
    assert!(text.contains("opened"), "{text}");
}

#[test]
fn state_is_not_overwritten_by_a_new_run() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a"]);
    made(&dirs);
    let error = created(&dirs);
    assert!(matches!(error, TierError::StateExists { .. }));
    says(&error, &["committed at step 1", "Engine::resume", dirs[0].to_str().unwrap()]);
    assert_eq!(reopened(&dirs).unwrap(), 1);
}

#[test]
fn there_is_nothing_to_open() {
    let root = tempfile::tempdir().unwrap();
    let nowhere = dirs(root.path(), &["nowhere"]);
    let error = reopened(&nowhere).unwrap_err();
    assert!(matches!(error, TierError::NoState { .. }));
    says(&error, &["nowhere", "no such directory"]);
    assert!(!nowhere[0].exists(), "looking makes nothing");
    let empty = [root.path().to_owned()];
    let error = reopened(&empty).unwrap_err();
    assert!(matches!(error, TierError::NoState { .. }));
    says(&error, &["no manifest"]);
    // A creation that never committed.
    killed(&empty);
    let error = reopened(&empty).unwrap_err();
    assert!(matches!(error, TierError::NoState { .. }));
    says(&error, &["never finished", "with Engine::create"]);
    made(&empty);
}

#[test]
fn a_file_in_the_place_of_a_directory_is_named() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    std::fs::write(&file, "").unwrap();
    for dir in [file.clone(), file.join("state")] {
        says(&created(&[dir]), &["creating ", "file is not a directory", "another path"]);
    }
}

#[test]
fn directories_in_another_order_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let right = dirs(root.path(), &["a", "b", "c"]);
    made(&right);
    says(
        &reopened(&dirs(root.path(), &["a", "c", "b"])).unwrap_err(),
        &["c/state.bin", "does not belong to path 2 of 3", "original order"],
    );
    let first_is_second = dirs(root.path(), &["b", "a", "c"]);
    let error = reopened(&first_is_second).unwrap_err();
    says(&error, &["manifest is in", "original order"]);
    says(&created(&first_is_second), &["Engine::resume", "committed at step 1"]);
    says(&reopened(&right[..2]).unwrap_err(), &["path 1 of 2", "original order"]);
    assert_eq!(reopened(&right).unwrap(), 1);
}

#[test]
fn directories_of_another_run_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let (one, two) = (dirs(root.path(), &["a", "b"]), dirs(root.path(), &["c", "d"]));
    made(&one);
    made(&two);
    says(&reopened(&dirs(root.path(), &["a", "d"])).unwrap_err(), &["d/state.bin", "does not belong"]);
    // Creating there would destroy half of a run.
    for names in [["new", "b"], ["b", "new"]] {
        let error = created(&dirs(root.path(), &names));
        assert!(matches!(error, TierError::StateExists { .. }), "{error}");
        says(&error, &["b/state.bin", "path 2 of 2", "another run"]);
    }
    assert_eq!((reopened(&one).unwrap(), reopened(&two).unwrap()), (1, 1));
}

#[test]
fn a_missing_or_truncated_file_is_named() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a", "b"]);
    made(&dirs);
    let path = dirs[1].join("state.bin");
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    file.set_len(len - 1).unwrap();
    let error = reopened(&dirs).unwrap_err();
    // What looks at the state refuses it as well, and is not to be advised.
    assert!(matches!(error, TierError::NoLayout { .. }));
    let needed = len.to_string();
    says(&error, &["b/state.bin", "truncated", &needed, "restore the directories"]);
    file.set_len(100).unwrap();
    says(&reopened(&dirs).unwrap_err(), &["b/state.bin", "truncated"]);
    std::fs::remove_file(&path).unwrap();
    says(&reopened(&dirs).unwrap_err(), &["b/state.bin is not there", "mount its drive"]);
    let manifest = dirs[0].join("manifest.bin");
    OpenOptions::new().write(true).open(&manifest).unwrap().set_len(8192).unwrap();
    says(&reopened(&dirs).unwrap_err(), &["manifest.bin", "truncated"]);
}

#[test]
fn a_flipped_byte_in_a_chunk_is_named() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a", "b", "c"]);
    made(&dirs);
    // Step 1 lives in generation 1, which begins at 6·(163840 + 65536) = 1376256: in the second stripe, so in b. Its weights
    // of layers.0 are followed by the moments at 1703936, whose second chunk is at 2228224: the third stripe, so c.
    let offset = HEADER_BYTES + 2_228_224 - (2 << 20) + 77;
    flip(&dirs[2].join("state.bin"), offset);
    let error = reopened(&dirs).unwrap_err();
    assert!(matches!(error, TierError::Damaged { .. }));
    let chunk_at = format!("chunk 1 at offset {}", offset - 77);
    says(&error, &["c/state.bin", "first moments of group", "layers.0", &chunk_at, "checksum"]);
    flip(&dirs[2].join("state.bin"), offset);
    assert_eq!(reopened(&dirs).unwrap(), 1);
}

/// What cannot be looked at may be there.
#[test]
fn a_manifest_that_cannot_be_looked_for_is_not_said_to_be_missing() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a"]);
    made(&dirs);
    let manifest = dirs[0].join("manifest.bin");
    std::fs::remove_file(&manifest).unwrap();
    let looked = || StoreView::open(&engine(), &dirs, Access::Look).unwrap_err();
    says(&looked(), &["holds no training state", "no manifest"]);
    std::os::unix::fs::symlink("manifest.bin", &manifest).unwrap();
    says(&looked(), &["looking for", "a/manifest.bin: Too many levels of symbolic links"]);
}

#[test]
fn one_broken_slot_falls_back_and_two_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a"]);
    made(&dirs);
    let manifest = dirs[0].join("manifest.bin");
    // Step 0 was commit 1 and went to slot 1; step 1 is in slot 0.
    let [newer, older] = slots(&manifest);
    flip(&manifest, newer + 60);
    assert_eq!(reopened(&dirs).unwrap(), 0, "the older step is still whole");
    flip(&manifest, older + 60);
    let error = reopened(&dirs).unwrap_err();
    says(&error, &["manifest.bin", "neither of the two slots", "none can be read", "from a copy"]);
    assert!(matches!(created(&dirs), TierError::NoLayout { .. }), "nor is it overwritten");
    flip(&manifest, newer + 60);
    assert_eq!(reopened(&dirs).unwrap(), 1);
    let len = std::fs::metadata(&manifest).unwrap().len();
    flip(&manifest, 20);
    flip(&manifest, len - 4096 + 20);
    says(&reopened(&dirs).unwrap_err(), &["manifest.bin", "header", "none can be read"]);
    assert!(matches!(created(&dirs), TierError::NoLayout { .. }));
}

#[test]
fn who_opens_a_state_removes_what_a_killed_run_left_beside_it() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a", "b"]);
    made(&dirs);
    let scratch = || dirs.iter().flat_map(|dir| terrace_tiers::TRAINING_SCRATCH.map(|name| dir.join(name)));
    let io = engine();
    for name in terrace_tiers::TRAINING_SCRATCH {
        std::mem::forget(Scratch::create(&io, &Striping::equal(&dirs), name, 2, 8192).unwrap());
    }
    assert!(scratch().all(|path| path.exists()));
    DiskStore::open(&engine(), &dirs).unwrap();
    assert!(scratch().all(|path| !path.exists()));
    // What has such a name, and is something else, is the user's.
    scratch().for_each(|path| std::fs::write(path, "mine").unwrap());
    DiskStore::open(&engine(), &dirs).unwrap();
    assert!(scratch().all(|path| path.exists()));
    // A directory that was never the state's is not made.
    let mistyped = root.path().join("c");
    let error = DiskStore::open(&engine(), &[dirs[0].clone(), mistyped.clone()]).unwrap_err();
    says(&error, &["/c", "there is no such directory"]);
    assert!(!mistyped.exists());
}

/// Bytes of which all but one are zeros.
fn hidden(len: usize, at: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[at] = 1;
    bytes
}

#[test]
fn files_of_others_with_our_names_are_named_and_kept() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a", "b"]);
    dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let contents = [b"mine".to_vec(), vec![7; 64 << 10], hidden(5000, 4999), hidden(3 << 20, 0x18_0000)];
    for (name, content) in
        ["manifest.bin", "state.bin"].iter().flat_map(|name| contents.iter().map(move |c| (name, c)))
    {
        // Of a manifest only the ends are looked at: a creation that was cut off leaves a layout between them.
        if *name == "manifest.bin" && content.len() > 1 << 20 {
            continue;
        }
        for dir in &dirs {
            let path = dir.join(name);
            std::fs::write(&path, content).unwrap();
            let named = path.to_str().unwrap();
            says(&created(&dirs), &[named, "move it away", "another directory"]);
            assert!(std::fs::read(&path).unwrap() == *content, "{named}");
            std::fs::remove_file(&path).unwrap();
        }
    }
    for (name, content) in
        terrace_tiers::TRAINING_SCRATCH.iter().flat_map(|name| contents.iter().map(move |c| (name, c)))
    {
        let path = dirs[1].join(name);
        std::fs::write(&path, content).unwrap();
        let error = Scratch::create(&engine(), &Striping::equal(&dirs), name, 2, 8192).unwrap_err();
        says(&error, &[path.to_str().unwrap(), "move it away", "another directory"]);
        assert!(std::fs::read(&path).unwrap() == *content);
        std::fs::remove_file(&path).unwrap();
    }
    made(&dirs);
    // Nor does one that continues take another's file for a manifest.
    let manifest = dirs[0].join("manifest.bin");
    for content in &contents[..3] {
        std::fs::write(&manifest, content).unwrap();
        says(&reopened(&dirs).unwrap_err(), &["manifest.bin", "move it away"]);
    }
}

#[test]
fn what_a_creation_left_that_was_cut_off_is_in_nobodys_way() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a", "b"]);
    dirs.iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    let again = || {
        made(&dirs);
        ["manifest.bin", "state.bin"]
            .iter()
            .for_each(|name| std::fs::remove_file(dirs[0].join(name)).unwrap());
        std::fs::remove_file(dirs[1].join("state.bin")).unwrap();
    };
    // A file that is getting its space: its length so far, and zeros.
    for len in [0, 100, 4096, 4097, (3 << 20) + 100] {
        for name in ["manifest.bin", "state.bin"] {
            std::fs::write(dirs[0].join(name), vec![0; len]).unwrap();
            again();
        }
    }
    // Layouts of a manifest that has no header yet.
    killed(&dirs);
    let manifest = OpenOptions::new().write(true).open(dirs[0].join("manifest.bin")).unwrap();
    for at in [0, manifest.metadata().unwrap().len() - 4096] {
        manifest.write_all_at(&[0; 4096], at).unwrap();
    }
    again();
    // Scratch: space, one header of two, a torn header.
    let name = terrace_tiers::TRAINING_SCRATCH[0];
    let scratch = || Scratch::create(&engine(), &Striping::equal(&dirs), name, 2, 8192);
    let path = dirs[0].join(name);
    for len in [0, 100, (3 << 20) + 100] {
        std::fs::write(&path, vec![0; len]).unwrap();
        scratch().unwrap();
        std::fs::write(&path, vec![0; len]).unwrap();
        drop(DiskStore::create(&engine(), &Striping::equal(&dirs), small()).unwrap());
        assert!(!path.exists());
    }
    for (from, to) in [(0, 4096), (40, 48)] {
        std::mem::forget(scratch().unwrap());
        OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .write_all_at(&vec![0; to - from], from as u64)
            .unwrap();
        scratch().unwrap();
    }
}

#[test]
fn a_state_larger_than_the_disk_is_refused_with_numbers() {
    let root = tempfile::tempdir().unwrap();
    let dirs = dirs(root.path(), &["a"]);
    let error = DiskStore::create(&engine(), &Striping::equal(&dirs), spec(1 << 50)).unwrap_err();
    let TierError::DiskTooSmall { needed, free, .. } = &error else { panic!("{error}") };
    assert!(*needed > 12 << 50 && *free <= free_space(root.path()).unwrap().unwrap() + (1 << 30));
    says(&error, &["needs 12.0 PiB", "are free", "EngineConfig::disks", "StateFormat"]);
    assert!(!error.to_string().contains("Durability::"), "half of it does not fit either: {error}");
    assert!(!dirs[0].join("state.bin").exists());
}

#[test]
fn a_file_system_that_does_not_count_its_space_is_not_full() {
    let dirs = [PathBuf::from("/proc")];
    assert_eq!(free_space(&dirs[0]).unwrap(), None);
    DiskStore::require_room(&small(), &Striping::equal(&dirs)).unwrap();
    in_own_mounts(|| {
        let root = tempfile::tempdir().unwrap();
        if !try_mount(c"ramfs", root.path(), 0, "") {
            println!("skipped, there is no ramfs here: {}", std::io::Error::last_os_error());
            return;
        }
        let dirs = [root.path().to_owned()];
        let mut store = DiskStore::create(&engine(), &Striping::equal(&dirs), small()).unwrap();
        step(&mut store, 0).unwrap();
        drop(store);
        assert_eq!(reopened(&dirs).unwrap(), 0);
    });
}

#[test]
fn a_full_disk_is_refused_before_or_while_creating() {
    in_own_mounts(|| {
        let root = tempfile::tempdir().unwrap();
        let dirs = [root.path().to_owned()];
        let each = DiskStore::bytes_per_dir(&small(), &Striping::equal(&dirs))[0];
        mount(root.path(), 0, &format!("size={}", each - 4096));
        let error = created(&dirs);
        assert!(matches!(error, TierError::DiskTooSmall { .. }), "{error}");
        says(
            &error,
            &["3.00 MiB", "are free, 4.00 KiB too little", "keep it once instead of twice (Durability::None"],
        );

        // The data fit, and the manifest does not: the engine is the one to find out.
        mount(root.path(), libc::MS_REMOUNT, &format!("size={}", each + 4096));
        let engine = engine();
        let error = DiskStore::create(&engine, &Striping::equal(&dirs), small()).unwrap_err();
        says(&error, &["manifest.bin", "No space left", "free space on that file system"]);
        assert!(!root.path().join("state.bin").exists(), "what could be made is of no use");

        // What a creation that never committed left is in nobody's way.
        mount(root.path(), libc::MS_REMOUNT, &format!("size={}", each + (64 << 10)));
        killed(&dirs);
        assert!(free_space(root.path()).unwrap().unwrap() < each);
        DiskStore::require_room(&small(), &Striping::equal(&dirs)).unwrap();

        // With room made, the same process can go on.
        mount(root.path(), libc::MS_REMOUNT, &format!("size={}", each + (1 << 20)));
        let mut store = DiskStore::create(&engine, &Striping::equal(&dirs), small()).unwrap();
        step(&mut store, 0).unwrap();
        drop(store);
        assert_eq!(reopened(&dirs).unwrap(), 0);
    });
}

#[test]
fn a_read_only_file_system_is_refused() {
    in_own_mounts(|| {
        let root = tempfile::tempdir().unwrap();
        mount(root.path(), 0, "size=16m");
        let old = dirs(root.path(), &["old"]);
        made(&old);
        mount(root.path(), libc::MS_REMOUNT | libc::MS_RDONLY, "size=16m");
        says(&reopened(&old).unwrap_err(), &["terrace.lock", "Read-only file system", "mounted read-only"]);
        says(&created(&dirs(root.path(), &["new"])), &["creating", "new", "Read-only file system"]);
        mount(root.path(), libc::MS_REMOUNT, "size=16m");
        assert_eq!(reopened(&old).unwrap(), 1);
    });
}

/// Runs a test where it may mount, on a thread with mounts of its own that vanish with it. Only root may; others skip.
fn in_own_mounts(test: fn()) {
    let thread = std::thread::spawn(move || {
        // SAFETY: affects only the file system view of this thread and of those it starts.
        if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0
            || !try_mount(c"tmpfs", Path::new("/"), PRIVATE, "")
        {
            println!("skipped, may not mount here: {}", std::io::Error::last_os_error());
            return;
        }
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

const PRIVATE: libc::c_ulong = libc::MS_REC | libc::MS_PRIVATE;

#[track_caller]
fn mount(at: &Path, flags: libc::c_ulong, options: &str) {
    assert!(try_mount(c"tmpfs", at, flags, options), "{}", std::io::Error::last_os_error());
}

fn try_mount(kind: &CStr, at: &Path, flags: libc::c_ulong, options: &str) -> bool {
    let at = CString::new(at.to_str().unwrap()).unwrap();
    let options = CString::new(options).unwrap();
    // SAFETY: every pointer is a C string that lives until the call returns.
    let rc =
        unsafe { libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast()) };
    rc == 0
}
