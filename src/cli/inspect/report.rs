//! What `terrace inspect` found: as text, as a document, and in one sentence that says what to do.

use crate::cli::identity::Identity;
use crate::cli::{shown, stored};
use crate::config::ByteSize;
use crate::error::CliError;
use serde_json::{Value, json};
use std::fmt;
use std::path::PathBuf;
use terrace_tiers::{
    BlobKind, Commit, CommitFacts, Damage, DamageCause, DamagedCopy, Recovery, SlotFacts, SlotState,
    StoreSpec, StoreView, Verification,
};

/// A commit whose chunks were read.
#[derive(Debug)]
pub(super) struct Verified {
    pub(super) step: u64,
    pub(super) found: Verification,
}

/// Everything that was found.
#[derive(Debug)]
pub(super) struct Report {
    spec: StoreSpec,
    identity: Identity,
    versions: (u32, u32),
    dirs: Vec<PathBuf>,
    shares: Vec<u64>,
    file_bytes: Vec<u64>,
    manifest: PathBuf,
    slots: [SlotFacts; 2],
    damaged_copies: Vec<DamagedCopy>,
    commits: [Option<CommitFacts>; 2],
    /// The step since which the only generation is being overwritten.
    changing_since: Option<u64>,
    /// Both commits name the same chunks.
    is_unchanged: bool,
    pub(super) last: Option<Verified>,
    pub(super) previous: Option<Verified>,
    pub(super) restored: Option<u64>,
}

impl Report {
    pub(super) fn of(view: &StoreView) -> Self {
        Self {
            spec: view.spec().clone(),
            identity: Identity::of(view.spec()),
            versions: view.format_versions(),
            dirs: view.striping().dirs().to_vec(),
            shares: view.striping().shares().to_vec(),
            file_bytes: view.file_bytes().to_vec(),
            manifest: view.manifest_path().to_owned(),
            slots: view.slots(),
            damaged_copies: damaged_copies(view),
            commits: [Commit::Last, Commit::Previous].map(|commit| view.commit(commit)),
            changing_since: view.changing_since(),
            is_unchanged: view.is_unchanged(),
            last: None,
            previous: None,
            restored: None,
        }
    }

    /// The last step is damaged and the one before it is whole; or it may be in a slot that the drive cannot read, and the other one is whole.
    pub(super) fn can_go_back(&self) -> bool {
        if self.unreadable().is_some() {
            return self.last.is_some() && damages(self.last.as_ref()) == 0;
        }
        damages(self.last.as_ref()) > 0 && self.previous.is_some() && damages(self.previous.as_ref()) == 0
    }

    /// Success if nothing is damaged, or was left behind by going back.
    ///
    /// # Errors
    /// What is damaged, in one sentence, and what to do.
    pub(super) fn verdict(&self, wants_back: bool) -> Result<(), CliError> {
        if let Some(step) = self.restored {
            eprintln!("the state is that of step {step} again: `terrace finetune --resume` goes on from it");
            return Ok(());
        }
        let refused = |message: String| Err(CliError::Failed(message));
        if let Some(step) = self.changing_since {
            return refused(format!(
                "no step of the state is whole: it is kept once (--durability none), and a run that was killed or failed was \
                 overwriting it; it was last whole at step {step}. It can be neither resumed nor exported: start again without \
                 --resume, from an exported model folder (the run's OUTPUT/checkpoint-N) or the original one, in an empty directory \
                 or after removing {}",
                stored::flags(&self.dirs)
            ));
        }
        let [Some(last), previous] = self.commits else {
            return refused(format!(
                "neither slot of {} is whole, so no step can be read; restore the directories from a copy, or remove them and \
                 start again without --resume",
                self.manifest.display()
            ));
        };
        let (damaged, before) = (damages(self.last.as_ref()), damages(self.previous.as_ref()));
        let step = last.step;
        if damaged > 0 {
            let what = format!("step {step} is damaged: {}", chunks(damaged));
            return refused(match previous {
                Some(_) if self.can_go_back() => format!(
                    "{what}. Step {} before it is whole: `terrace inspect {} --verify --restore-previous` goes back to it, and \
                     `terrace finetune --resume` continues from there",
                    self.previous.as_ref().map_or(0, |verified| verified.step),
                    stored::flags(&self.dirs)
                ),
                Some(previous) if self.is_unchanged => format!(
                    "{what}. Step {} before it has the same chunks, so there is nothing to go back to; {START_AGAIN}",
                    previous.step
                ),
                Some(previous) => format!(
                    "{what}, and so is step {} before it: {}, damaged or written over by the step that was begun next. There is \
                     nothing to go back to; {START_AGAIN}",
                    previous.step,
                    chunks(before)
                ),
                None => format!("{what}, and there is no step before it to go back to; {START_AGAIN}"),
            });
        }
        if let Some(slot) = self.unreadable() {
            let what = format!(
                "the drive cannot read a slot of {}, {} bytes at offset {}, which may be that of the newest step, and --resume refuses \
                 that",
                self.manifest.display(),
                slot.len,
                slot.offset
            );
            let flags = stored::flags(&self.dirs);
            return refused(match self.last {
                Some(_) => format!(
                    "{what}. Step {step}, that of the other, is whole: if the drive goes on failing, `terrace inspect {flags} --verify \
                     --restore-previous` makes it the last, and `terrace finetune --resume` continues from there"
                ),
                None => format!(
                    "{what}. The other one is of step {step}: `terrace inspect {flags} --verify` says whether that is whole"
                ),
            });
        }
        if wants_back {
            eprintln!("step {step} is whole: there is no reason to go back, and nothing was changed");
        }
        if before > 0 {
            return refused(format!(
                "step {step} is whole, so --resume works; step {} before it is not: {}, written over by a step that was begun \
                 next and cut off, as after a kill, or damaged",
                self.previous.as_ref().map_or(0, |verified| verified.step),
                chunks(before)
            ));
        }
        if let Some(slot) = self.slots.iter().find(|slot| matches!(slot.state, SlotState::Torn { .. })) {
            let if_verified = if self.last.is_some() { ", which is whole" } else { "" };
            return refused(format!(
                "a slot of {} is not whole, {} bytes at offset {}: it is damaged, or a power cut ended a commit. The state is \
                 that of step {step}{if_verified}; --resume continues from it, and the next commit writes the slot anew",
                self.manifest.display(),
                slot.len,
                slot.offset
            ));
        }
        self.copies_verdict(step)
    }

    /// The slot that the drive cannot read, if there is one.
    fn unreadable(&self) -> Option<&SlotFacts> {
        self.slots.iter().find(|slot| slot.state == SlotState::Unreadable)
    }

    /// Success if no copy of what says how the state is laid out is damaged.
    fn copies_verdict(&self, step: u64) -> Result<(), CliError> {
        let [copy, more @ ..] = &self.damaged_copies[..] else { return Ok(()) };
        let more = match more.len() {
            0 => String::new(),
            more => format!(" (and so are {more} others, whose other copies are used)"),
        };
        let if_verified = if self.last.is_some() { ", which is whole" } else { "" };
        Err(CliError::Failed(format!(
            "{copy}; the other is used{more}. The state is that of step {step}{if_verified}; --resume continues from it and writes \
             the copy anew"
        )))
    }

    /// The document of `--json`.
    pub(super) fn document(&self) -> Value {
        let spec = &self.spec;
        let groups = (0..spec.groups.len()).map(|group| {
            let name = &spec.groups[group].name;
            json!({ "name": name, "elements": spec.groups[group].elements, "chunks": spec.chunks(group) })
        });
        let kinds = self.kinds().into_iter().map(|kind| {
            json!({
                "kind": kind.kind,
                "words": kind.kind.words(),
                "block_elements": kind.block_elements,
                "block_bytes": kind.block_bytes,
                "bytes": kind.bytes,
            })
        });
        let paths = self.dirs.iter().zip(&self.shares).zip(&self.file_bytes);
        let paths = paths
            .map(|((path, share), bytes)| json!({ "path": shown(path), "share": share, "bytes": bytes }));
        let generation_bytes = spec.volume_bytes() / spec.generations;
        json!({
            "manifest_version": self.versions.0,
            "format_version": self.versions.1,
            "step": self.commits[0].map(|facts| facts.step),
            "previous_step": self.commits[1].map(|facts| facts.step),
            "changing_since_step": self.changing_since,
            "slots": self.slots.map(|slot| self.slot_document(slot)),
            "damaged_copies": self.damaged_copies.iter().map(copy_document).collect::<Vec<_>>(),
            "identity": self.identity.document(),
            "groups": groups.collect::<Vec<_>>(),
            "kinds": kinds.collect::<Vec<_>>(),
            "chunk_elements": spec.chunk_elements,
            "chunks": self.chunks(),
            "generations": spec.generations,
            "generation_bytes": generation_bytes,
            "total_bytes": self.file_bytes.iter().sum::<u64>(),
            "paths": paths.collect::<Vec<_>>(),
            "verified": self.last.as_ref().map(verified_document),
            "verified_previous": self.previous.as_ref().map(verified_document),
            "whole": (self.last.is_some() || !self.is_whole()).then(|| self.is_whole()),
            "restored_step": self.restored,
        })
    }

    fn is_whole(&self) -> bool {
        damages(self.last.as_ref()) + damages(self.previous.as_ref()) == 0
            && self.changing_since.is_none()
            && self.damaged_copies.is_empty()
            && !self
                .slots
                .iter()
                .any(|slot| matches!(slot.state, SlotState::Torn { .. } | SlotState::Unreadable))
    }

    fn slot_document(&self, slot: SlotFacts) -> Value {
        let (state, step, generation) = match slot.state {
            SlotState::Blank => ("blank", None, None),
            SlotState::Torn { claimed_step } => ("damaged", claimed_step, None),
            SlotState::Unreadable => ("unreadable", None, None),
            SlotState::Whole(facts) => ("whole", Some(facts.step), Some(facts.generation)),
            SlotState::Changing { since_step } => ("changing", Some(since_step), None),
        };
        json!({
            "path": shown(&self.manifest),
            "offset": slot.offset,
            "bytes": slot.len,
            "state": state,
            "step": step,
            "generation": generation,
        })
    }

    fn chunks(&self) -> usize {
        (0..self.spec.groups.len()).map(|group| self.spec.chunks(group)).sum::<usize>()
            * self.spec.kinds.len()
    }

    fn kinds(&self) -> Vec<KindBytes> {
        let bytes =
            |kind: &terrace_tiers::BlobSpec| self.spec.groups.iter().map(|g| kind.bytes(g.elements)).sum();
        let kinds = self.spec.kinds.iter().map(|kind| KindBytes {
            kind: kind.kind,
            block_elements: kind.block_elements,
            block_bytes: kind.block_bytes,
            bytes: bytes(kind),
        });
        kinds.collect()
    }

    fn write_commits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, facts) in [("step", self.commits[0]), ("step before", self.commits[1])] {
            match facts {
                Some(facts) => line(
                    f,
                    name,
                    &format!("{} (commit {}, generation {})", facts.step, facts.sequence, facts.generation),
                )?,
                None if name == "step" && self.changing_since.is_some() => {
                    let since = self.changing_since.unwrap_or_default();
                    line(
                        f,
                        name,
                        &format!("none is whole: the state is being overwritten since step {since}"),
                    )?;
                }
                None if name == "step" => line(f, name, "unknown: no slot of the manifest is whole")?,
                None => line(f, name, "none")?,
            }
        }
        for slot in &self.slots {
            let place =
                || format!("{} bytes at offset {} of {}", slot.len, slot.offset, self.manifest.display());
            match slot.state {
                SlotState::Torn { claimed_step } => {
                    let claim =
                        claimed_step.map_or(String::new(), |step| format!("; its header names step {step}"));
                    line(f, "DAMAGED", &format!("slot of the manifest, {}{claim}", place()))?;
                }
                SlotState::Unreadable => {
                    line(f, "UNREADABLE", &format!("slot of the manifest, {}", place()))?;
                }
                SlotState::Blank | SlotState::Whole(_) | SlotState::Changing { .. } => {}
            }
        }
        for copy in &self.damaged_copies {
            line(f, "DAMAGED", &format!("{copy}; the other is used"))?;
        }
        if self.is_unchanged {
            line(
                f,
                "",
                "both name the same chunks: the last step changed none, or the state went back to it",
            )?;
        }
        Ok(())
    }

    fn write_layout(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = "paths";
        for ((dir, share), bytes) in self.dirs.iter().zip(&self.shares).zip(&self.file_bytes) {
            let of = self.shares.iter().sum::<u64>();
            let share =
                if self.dirs.len() > 1 { format!(", {share} of {of} stripes") } else { String::new() };
            line(f, name, &format!("{} ({}{share})", dir.display(), ByteSize(*bytes)))?;
            name = "";
        }
        let elements: u64 = self.spec.groups.iter().map(|group| group.elements).sum();
        let groups = self.spec.groups.len();
        line(f, "groups", &format!("{groups}, {elements} elements with padding"))?;
        for run in runs(&self.spec) {
            line(f, "", &run)?;
        }
        let state = self.identity.state().map_or(String::new(), |state| format!("{state}: "));
        let words: Vec<&str> = self.spec.kinds.iter().map(|kind| kind.kind.words()).collect();
        line(f, "state", &format!("{state}{}", words.join(", ")))?;
        for kind in self.kinds() {
            let each = match kind.block_elements {
                1 => format!("{} bytes each", kind.block_bytes),
                elements => format!("{} bytes for every {elements}", kind.block_bytes),
            };
            line(
                f,
                "",
                &format!("{:<34} {:>9}  {each}", kind.kind.words(), ByteSize(kind.bytes).to_string()),
            )?;
        }
        let bytes = self.spec.volume_bytes();
        let one = ByteSize(bytes / self.spec.generations);
        let (chunks, elements) = (self.chunks(), self.spec.chunk_elements);
        match self.spec.generations {
            1 => line(f, "generations", &format!("1 of {one}: kept once, overwritten in place"))?,
            count => line(f, "generations", &format!("{count} of {one}, together {}", ByteSize(bytes)))?,
        }
        line(f, "chunks", &format!("{chunks} a generation, of up to {elements} elements"))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (manifest, state) = self.versions;
        line(f, "format", &format!("manifest.bin version {manifest}, state.bin version {state}"))?;
        self.write_commits(f)?;
        self.write_layout(f)?;
        let mut name = "run";
        for (key, value) in self.identity.lines() {
            line(f, name, &format!("{key}: {value}"))?;
            name = "";
        }
        for verified in [&self.last, &self.previous].into_iter().flatten() {
            let Verified { step, found } = verified;
            let Verification { chunks: read, bytes, damages } = found;
            let whole = match damages.len() {
                0 => "all as they were written".into(),
                count => format!("{count} of them NOT as written"),
            };
            line(f, "verified", &format!("step {step}: {read} chunks, {}, {whole}", ByteSize(*bytes)))?;
            for damage in damages {
                line(f, "DAMAGED", &format!("step {step}: {damage}"))?;
            }
        }
        Ok(())
    }
}

/// What one kind of state takes in a generation.
struct KindBytes {
    kind: BlobKind,
    block_elements: u64,
    block_bytes: u64,
    bytes: u64,
}

const START_AGAIN: &str =
    "restore the directories from a copy, or remove them and start again without --resume";

fn line(f: &mut fmt::Formatter<'_>, name: &str, text: &str) -> fmt::Result {
    writeln!(f, "{name:<12} {text}")
}

fn damaged_copies(view: &StoreView) -> Vec<DamagedCopy> {
    let copies = view.recoveries().iter().filter_map(|recovery| match recovery {
        Recovery::Copy { copy, .. } => Some(copy.clone()),
        _ => None,
    });
    copies.collect()
}

fn copy_document(copy: &DamagedCopy) -> Value {
    let part = &copy.part;
    json!({
        "what": copy.what,
        "path": shown(&part.path),
        "offset": part.offset,
        "bytes": part.len,
        "error": copy.unreadable.as_ref().map(ToString::to_string),
    })
}

fn damages(verified: Option<&Verified>) -> usize {
    verified.map_or(0, |verified| verified.found.damages.len())
}

fn chunks(count: usize) -> String {
    format!("{count} {} not what was written", if count == 1 { "chunk is" } else { "chunks are" })
}

/// Groups in lines, one for a run of groups of the same size.
fn runs(spec: &StoreSpec) -> Vec<String> {
    let same = spec.groups.chunk_by(|a, b| a.elements == b.elements);
    let show = |run: &[terrace_tiers::GroupSpec]| match run {
        [group] => format!("{}: {}", group.name, group.elements),
        run => format!("{} … {}: {} × {}", run[0].name, run[run.len() - 1].name, run.len(), run[0].elements),
    };
    same.map(show).collect()
}

fn verified_document(verified: &Verified) -> Value {
    let found = &verified.found;
    let damages: Vec<Value> = found.damages.iter().map(damage_document).collect();
    json!({ "step": verified.step, "chunks": found.chunks, "bytes": found.bytes, "damages": damages })
}

fn damage_document(damage: &Damage) -> Value {
    let parts = damage.parts.iter();
    let parts =
        parts.map(|part| json!({ "path": shown(&part.path), "offset": part.offset, "bytes": part.len }));
    let cause = match &damage.cause {
        DamageCause::Checksum { found, expected } => {
            format!("checksum {found:016x} instead of {expected:016x}")
        }
        DamageCause::Unreadable(error) => error.to_string(),
    };
    json!({
        "group": damage.group,
        "kind": damage.kind,
        "chunk": damage.chunk,
        "parts": parts.collect::<Vec<_>>(),
        "cause": cause,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use terrace_aio::engine::{SimConfig, SimEngine};
    use terrace_aio::layer::{Action, FaultConfig, FaultLayer};
    use terrace_aio::{IoEngine, IoErrorKind};
    use terrace_tiers::{Access, BlobKey, BlobSpec, DiskStore, GroupSpec, Lease, Striping};

    /// A drive that cannot read a slot is no reason to throw the step away that may be there, nor to leave the user without a way.
    #[test]
    fn a_slot_that_cannot_be_read_has_a_way_out() {
        let disk: Arc<dyn IoEngine> = Arc::new(SimEngine::new(SimConfig::default()));
        let dirs = [PathBuf::from("/disk")];
        let weights = BlobSpec { kind: BlobKind::Weight, block_elements: 1, block_bytes: 2 };
        let group = GroupSpec { name: "all".into(), elements: 4096 };
        let (groups, kinds) = (vec![group], vec![weights]);
        let spec = StoreSpec { groups, kinds, chunk_elements: 4096, generations: 2, identity: String::new() };
        let store = DiskStore::create(&disk, &Striping::equal(&dirs), spec.clone()).unwrap();
        for step in [0, 1] {
            let key = BlobKey { group: 0, kind: BlobKind::Weight };
            store.write(key, 0, Lease::standalone(spec.chunk_bytes(key, 0))).unwrap();
            store.commit(step, &[]).unwrap();
        }
        drop(store);
        let looked = (0..).map_while(|nth| {
            let faults = Arc::new(FaultLayer::new(Arc::clone(&disk), FaultConfig::default()));
            faults.fail_nth(Action::Read, nth, IoErrorKind::Device);
            let view = StoreView::open(&(Arc::clone(&faults) as _), &dirs, Access::Look).unwrap();
            (faults.injected() > 0).then_some(view)
        });
        let mut seen = 0;
        for mut view in looked {
            let mut report = Report::of(&view);
            let Some(place) = report.unreadable().map(|slot| slot.offset) else { continue };
            seen += 1;
            let step = view.commit(Commit::Last).unwrap().step;
            assert!(!report.can_go_back() && !report.is_whole());
            let said = report.verdict(false).unwrap_err().to_string();
            let part = format!("offset {place}, which may be that of the newest step");
            assert!(said.contains(&part) && said.ends_with("--verify` says whether that is whole"), "{said}");
            let found = view.verify(Commit::Last, &mut |_, _| {}).unwrap().unwrap();
            report.last = Some(Verified { step, found });
            assert!(report.can_go_back());
            let said = report.verdict(false).unwrap_err().to_string();
            let part = format!("Step {step}, that of the other, is whole: if the drive goes on failing");
            assert!(said.contains(&part) && said.contains("--restore-previous"), "{said}");
            assert!(report.to_string().contains("UNREADABLE"), "{report}");
            assert_eq!(report.document()["whole"], false);
        }
        assert_eq!(seen, 2);
    }
}
