//! `terrace inspect`: what a directory of training state holds, whether it is whole, and the way back to the step before.

mod report;

use super::args::InspectArgs;
use super::{print_json, print_text, stored};
use crate::error::CliError;
use crate::progress::ByteProgress;
use report::{Report, Verified};
use terrace_tiers::{Access, Commit, StoreView};

/// Runs the command.
///
/// # Errors
/// There is no state, it is in use, or it is damaged and did not go back to the step before.
pub fn inspect(args: &InspectArgs) -> Result<(), CliError> {
    let access = if args.restore_previous { Access::Restore } else { Access::Look };
    let mut view = stored::open(&args.state, access)?;
    let mut report = Report::of(&view);
    if args.verify {
        report.last = verify(&mut view, Commit::Last)?;
        // What both name was read already.
        if !view.is_unchanged() {
            report.previous = verify(&mut view, Commit::Previous)?;
        }
    }
    if args.restore_previous && report.can_go_back() {
        report.restored = Some(view.restore_previous().map_err(CliError::failed)?);
    }
    if args.json {
        print_json(&report.document())?;
    } else {
        print_text(report.to_string().trim_end())?;
    }
    report.verdict(args.restore_previous)
}

fn verify(view: &mut StoreView, commit: Commit) -> Result<Option<Verified>, CliError> {
    let Some(facts) = view.commit(commit) else { return Ok(None) };
    let bar = ByteProgress::new(format!("verifying step {}", facts.step));
    let found = view.verify(commit, &mut |done, total| bar.set(done, total));
    bar.finish();
    let found = found.map_err(CliError::failed)?;
    Ok(found.map(|found| Verified { step: facts.step, found }))
}
