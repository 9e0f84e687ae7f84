//! What a run is refused for before its data is read, which may take long, or before anything of it is written.

use super::args::{FinetuneArgs, Offload};
use super::finetune::{advise, all_params, engine_config, size, state_dirs};
use super::pinned::{Pinned, Totals, Windows};
use super::session::{Session, check_activations};
use super::stored;
use crate::config::{GroupFlag, TrainConfig};
use crate::error::CliError;
use terrace_models::{Model, ModelConfig, TokenBatch};
use terrace_tiers::TierError;
use terrace_zero::{Block, Engine, EngineConfig, EngineError, Outlook, ParamSpec, PlanningRuns};

/// All that can be known without the data.
pub(super) fn before_data(
    run: &TrainConfig,
    args: &FinetuneArgs,
    session: &Session,
    model: &Model,
) -> Result<(), CliError> {
    groups(args, run, &model.blocks)?;
    check_activations(run.activations, run.offload, session.backend.device.unified())?;
    warn_of_flags_of_cards(args, session);
    if let Some(pinned) = &run.pinned {
        plan(pinned, run, args, session, &model.config)?;
    }
    saved_state(session, run)?;
    // State that is there has been made with a plan, which may take more than this.
    if run.pinned.is_none() && !run.resume {
        fits(run, args, session, &model.config)?;
    }
    Ok(())
}

/// Refuses a run whose plan does not fit here.
fn fits(
    run: &TrainConfig,
    args: &FinetuneArgs,
    session: &Session,
    model: &ModelConfig,
) -> Result<(), CliError> {
    let config = engine_config(run, &args.placement, session, String::new())?;
    let outlook = outlook(config.clone(), run, session, model);
    outlook.map(drop).map_err(|error| advise(error, &config, session, model, run.resume).into())
}

fn outlook(
    config: EngineConfig,
    run: &TrainConfig,
    session: &Session,
    model: &ModelConfig,
) -> Result<Outlook, EngineError> {
    let sample = TokenBatch::new(model).shape(run.batch_size, run.seq_len);
    let blocks = terrace_models::build(model);
    Engine::outlook(config, &session.backend, blocks, &sample, &PlanningRuns::default())
}

/// Says which flags only a card has a use for.
fn warn_of_flags_of_cards(args: &FinetuneArgs, session: &Session) {
    let flags = [
        ("--optimizer-ratio", args.optimizer_ratio.is_some()),
        ("--device-memory", args.placement.device_memory.is_some()),
    ];
    for (flag, _) in flags.into_iter().filter(|(_, is_there)| *is_there && session.backend.device.unified()) {
        eprintln!("warning: {flag} has no effect on the CPU, whose memory is the host's");
    }
}

/// Refuses a plan of another run, or one that does not fit here, before anything is written.
fn plan(
    pinned: &Pinned,
    run: &TrainConfig,
    args: &FinetuneArgs,
    session: &Session,
    model: &ModelConfig,
) -> Result<(), CliError> {
    pinned.check_model(model, session.backend.device.unified())?;
    let config = engine_config(run, &args.placement, session, String::new())?;
    pinned.check_budget(config.host_budget, config.device_budget)?;
    let outlook = outlook(config, run, session, model).map_err(|error| pinned.explain(error))?;
    pinned.check_copies(outlook.copied_bytes, args.placement.disk_cache.0)?;
    let (planned, here) = (pinned.file.bytes, Totals::new(&outlook.memory));
    if planned != here {
        eprintln!(
            "note: with the optimizer, the clipping, the threads and the disks of this run the plan takes {} of host memory, {} of the \
             device's and {} of disk, not {}, {} and {}",
            size(here.host),
            size(here.device),
            size(here.disk),
            size(planned.host),
            size(planned.device),
            size(planned.disk)
        );
    }
    if run.resume {
        return Ok(());
    }
    pinned.check_windows(&Windows::new(outlook.windows, outlook.keepers))
}

/// Says which flag names parameters that the model does not have, or that none are left to train.
fn groups(args: &FinetuneArgs, run: &TrainConfig, blocks: &[Box<dyn Block>]) -> Result<(), CliError> {
    let params = all_params(blocks);
    let matches = |group: &&GroupFlag| params.iter().any(|param| group.0.matches(&param.name));
    let Some(index) = run.groups.iter().position(|group| !matches(&group)) else {
        let first = |param: &ParamSpec| run.groups.iter().find(|group| group.0.matches(&param.name));
        if params.iter().all(|param| first(param).is_some_and(|group| group.0.frozen)) {
            let message =
                "--param-group: all parameters are frozen, and nothing is left to train; freeze fewer";
            return Err(CliError::Usage(message.into()));
        }
        return Ok(());
    };
    let flag = if index < args.param_group.len() { "--param-group" } else { "--no-decay" };
    let names: Vec<&str> = params.iter().rev().take(3).map(|param| param.name.as_str()).collect();
    Err(CliError::Usage(format!(
        "{flag} {}: no parameter of the model has such a name; names are like {}, and * stands for any characters",
        run.groups[index].0.pattern,
        names.join(", ")
    )))
}

/// State at the last step of a run may lack its model yet; state that is beyond it is not that of the run that is asked for.
pub(super) fn has_steps_left(engine: &Engine, steps: u64, run: &TrainConfig) -> Result<(), CliError> {
    let step = engine.step();
    if step <= steps {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "the state in {} is at step {step}, and this run would end at step {steps}: raise --steps or --epochs to go on from it, or write \
         the model that it holds with `terrace export`",
        state_dirs(run)[0].display()
    )))
}

/// Says before the data is read whether there is state to resume, or in the way of a new run.
fn saved_state(session: &Session, run: &TrainConfig) -> Result<(), CliError> {
    let disks = state_dirs(run);
    match Engine::stored(&session.backend.io, &disks) {
        Err(EngineError::Tier(TierError::NoState { .. })) if !run.resume => Ok(()),
        Err(EngineError::Tier(error @ TierError::NoState { .. })) => {
            let what_to_do = match run.offload {
                Offload::Disk => {
                    "leave out --resume to begin a run, or give the --output and each --disk of the one to continue"
                }
                Offload::None | Offload::Host => {
                    "leave out --resume to begin a run, or give the --output of the one to continue; with --offload disk and each --disk of it \
                     if its state is elsewhere"
                }
            };
            Err(CliError::Failed(stored::no_state(&error, what_to_do)))
        }
        Err(error) => Err(error.into()),
        Ok(stored) if run.resume => {
            stored::say(&stored.recoveries);
            Ok(())
        }
        Ok(stored) => Err(CliError::Failed(format!(
            "{} already holds training state, saved at step {}; pass --resume to continue it, or remove the directory to \
             start over",
            disks[0].display(),
            stored.step
        ))),
    }
}

/// Refuses saves of state in memory that have no room. A run without any is only warned: of what Ctrl-C will not do.
pub(super) fn room_for_saves(engine: &Engine, run: &TrainConfig) -> Result<(), CliError> {
    match engine.require_room_for_saves() {
        Err(error) if run.save_every.is_none() => {
            eprintln!(
                "warning: {error}. Until then a run that is interrupted or fails leaves the model, but cannot be resumed"
            );
            Ok(())
        }
        checked => Ok(checked?),
    }
}
