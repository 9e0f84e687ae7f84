//! What the simulated disk is for: a protocol that commits by flipping a slot survives a power cut at every single
//! operation, the same one without its syncs does not, and a seed determines everything.

use std::path::Path;
use terrace_aio::engine::{SimConfig, SimEngine};
use terrace_aio::{FileId, IoBuf, IoEngine, IoError, IoErrorKind, OpenMode, Request};

const DATA: &str = "/data";
const SLOTS: &str = "/slots";
/// Bytes of a generation; several sectors, so that it can be torn.
const LEN: usize = 8192;
const STEPS: u64 = 6;

struct Store<'a> {
    disk: &'a SimEngine,
    data: FileId,
    slots: FileId,
    /// Whether the data is made durable before the slot that points to it.
    syncs_data: bool,
}

impl<'a> Store<'a> {
    fn create(disk: &'a SimEngine, syncs_data: bool) -> Result<Self, IoError> {
        let data = disk.open(DATA.as_ref(), OpenMode::CreateNew { len: 2 * LEN as u64 })?;
        let slots = disk.open(SLOTS.as_ref(), OpenMode::CreateNew { len: 1024 })?;
        Ok(Self { disk, data, slots, syncs_data })
    }

    /// Writes generation `step` out of place, then makes its slot name it. A slot is one sector: it is never torn.
    fn commit(&self, step: u64) -> Result<(), IoError> {
        let half = step % 2;
        let mut bytes = IoBuf::zeroed(LEN);
        bytes.fill(step as u8);
        self.disk.submit(Request::write(self.data, half * LEN as u64, bytes)).wait()?;
        if self.syncs_data {
            self.disk.sync(self.data).wait()?;
        }
        let mut slot = IoBuf::zeroed(512);
        slot[..8].copy_from_slice(&step.to_le_bytes());
        self.disk.submit(Request::write(self.slots, half * 512, slot)).wait()?;
        self.disk.sync(self.slots).wait()?;
        Ok(())
    }
}

/// The step that the slots name and whether its data is whole.
fn recover(disk: &SimEngine) -> (u64, bool) {
    let (Some(slots), Some(data)) = (disk.contents(SLOTS.as_ref()), disk.contents(DATA.as_ref())) else {
        return (0, true);
    };
    let step_at = |at: usize| u64::from_le_bytes(slots[at..at + 8].try_into().unwrap());
    let step = step_at(0).max(step_at(512));
    let start = (step % 2) as usize * LEN;
    let is_whole = step == 0 || data[start..start + LEN].iter().all(|&byte| byte == step as u8);
    (step, is_whole)
}

/// Runs until the power goes after `operations`; gives the last step that was acknowledged.
fn run(disk: &SimEngine, operations: u64, syncs_data: bool) -> u64 {
    disk.power_cut_after(operations);
    let Ok(store) = Store::create(disk, syncs_data) else { return 0 };
    for step in 1..=STEPS {
        match store.commit(step) {
            Ok(()) => {}
            Err(error) => {
                assert_eq!(error.kind, IoErrorKind::Closed, "{error}");
                return step - 1;
            }
        }
    }
    STEPS
}

/// Every cut of a run, with several crash images each; gives the number of broken images.
fn broken_images(syncs_data: bool) -> usize {
    let mut broken = 0;
    for seed in 0..4 {
        let config = SimConfig { seed, block_bytes: 4096, ..SimConfig::default() };
        for operations in 0.. {
            let disk = SimEngine::new(config.clone());
            let acknowledged = run(&disk, operations, syncs_data);
            for crash_seed in 0..6 {
                let (step, is_whole) = recover(&disk.crash(crash_seed));
                if step < acknowledged || step > acknowledged + 1 || !is_whole {
                    assert!(
                        !syncs_data,
                        "seed {seed}, cut at {operations}, crash {crash_seed}: step {step} of {acknowledged}"
                    );
                    broken += 1;
                }
            }
            if !disk.is_cut() || acknowledged == STEPS {
                break;
            }
        }
    }
    broken
}

#[test]
fn a_synced_commit_survives_every_cut() {
    assert_eq!(broken_images(true), 0);
}

/// The canary of this file.
#[test]
fn a_commit_without_its_sync_is_caught() {
    assert!(broken_images(false) > 0);
}

#[test]
fn a_seed_determines_everything() {
    let image = |seed: u64| {
        let disk = SimEngine::new(SimConfig { seed, block_bytes: 1000, ..SimConfig::default() });
        let file = disk.open(DATA.as_ref(), OpenMode::CreateNew { len: 100_000 }).unwrap();
        let tickets: Vec<_> = (0..10u8)
            .map(|i| {
                let mut buf = IoBuf::zeroed(9000);
                buf.fill(i + 1);
                disk.submit(Request::write(file, u64::from(i) * 10_000, buf))
            })
            .collect();
        disk.power_cut_after(40);
        let outcomes: Vec<bool> = tickets.into_iter().map(|ticket| ticket.wait().is_ok()).collect();
        (outcomes, disk.operations(), disk.crash(seed).contents(DATA.as_ref()).unwrap())
    };
    for seed in 0..5 {
        assert!(image(seed) == image(seed), "seed {seed}");
    }
    assert!(image(1).2 != image(2).2);
}

#[test]
fn after_a_cut_everything_is_closed() {
    let disk = SimEngine::new(SimConfig::default());
    let file = disk.open(DATA.as_ref(), OpenMode::CreateNew { len: 4096 }).unwrap();
    let pending = disk.submit(Request::read(file, 0, IoBuf::zeroed(4096)));
    drop(pending.wait());
    disk.power_cut_after(0);
    assert!(disk.is_cut());
    let closed = |result: Result<IoBuf, IoError>| assert_eq!(result.unwrap_err().kind, IoErrorKind::Closed);
    closed(disk.submit(Request::read(file, 0, IoBuf::zeroed(1))).wait());
    closed(disk.submit(Request::write(file, 0, IoBuf::zeroed(1))).wait());
    closed(disk.sync(file).wait());
    assert_eq!(disk.open(DATA.as_ref(), OpenMode::Read).unwrap_err().kind, IoErrorKind::Closed);
    assert_eq!(
        disk.open("/b".as_ref(), OpenMode::CreateNew { len: 0 }).unwrap_err().kind,
        IoErrorKind::Closed
    );
    assert_eq!(disk.remove(Path::new(DATA)).unwrap_err().kind, IoErrorKind::Closed);
}

#[test]
fn a_sync_does_not_cover_writes_in_flight() {
    // With everything lost that may be lost, some seed must lose the write that was in flight at the sync's submission.
    let mut lost = 0;
    for seed in 0..60 {
        let disk = SimEngine::new(SimConfig { seed, ..SimConfig::default() });
        let file = disk.open(DATA.as_ref(), OpenMode::CreateNew { len: 512 }).unwrap();
        let mut buf = IoBuf::zeroed(512);
        buf.fill(1);
        let write = disk.submit(Request::write(file, 0, buf));
        let sync = disk.sync(file);
        write.wait().unwrap();
        sync.wait().unwrap();
        lost += usize::from(disk.crash(seed).contents(DATA.as_ref()).unwrap()[0] == 0);
    }
    assert!(lost > 0);
}

#[test]
fn lengths_of_unsynced_growth_may_be_lost() {
    let mut lens = std::collections::BTreeSet::new();
    for seed in 0..100 {
        let disk = SimEngine::new(SimConfig { seed, ..SimConfig::default() });
        let file = disk.open(DATA.as_ref(), OpenMode::CreateNew { len: 100 }).unwrap();
        disk.submit(Request::write(file, 100, IoBuf::zeroed(900))).wait().unwrap();
        lens.insert(disk.crash(seed).contents(DATA.as_ref()).unwrap().len());
    }
    assert!(lens.contains(&100) && lens.contains(&1000), "{lens:?}");
}
