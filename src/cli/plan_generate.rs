//! `terrace plan --generate`: what generation would need, and how fast it could be.
//!
//! Two plans of one configuration: of the prompts, which fixes the memory, and of a single new token for each, which is what repeats.

use super::args::{KvTier, Offload, WeightFormat};
use super::floor::time;
use super::knobs::{KV_TIERS, WEIGHT_FORMATS, advise, any_of, first_after, largest_below};
use super::pinned::{ModelShape, Term, Totals, name};
use super::placement::PlacedGroups;
use super::plan::{Planning, exponent, first_best, rows};
use super::session;
use super::{placement, print_json, print_text};
use crate::error::CliError;
use crate::floor::Floor;
use crate::progress::count;
use crate::shape;
use serde_json::{Value, json};
use terrace_models::{Model, TokenBatch};
use terrace_tiers::{ByteSize, Tier};
use terrace_zero::{BatchLimits, Engine, EngineConfig, EngineError, Outlook, PlanningRuns, WindowOverrides};

/// What the number of prompts is multiplied with in the table of choices.
const BATCHES: [usize; 3] = [1, 4, 16];

/// Of the table of choices.
const HEADER: &str = "weights  offload  batch        host      device        disk    a token      tok/s";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Choice {
    weights: WeightFormat,
    offload: Offload,
    batch: usize,
}

/// A choice, and what else a plan depends on that another value could make fit.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    choice: Choice,
    /// Tokens of a prompt.
    length: usize,
    new_tokens: usize,
    kv: KvTier,
}

/// A choice that fits.
struct Planned {
    choice: Choice,
    /// Of the prompts.
    outlook: Outlook,
    /// Of the prompts, and of a new token for each.
    floors: [Floor; 2],
    token: Outlook,
}

type Choices = Vec<(Choice, Result<Planned, EngineError>)>;

/// Runs the command.
///
/// # Errors
/// The model is refused or the plan does not fit.
pub(super) fn plan(planning: &Planning<'_>) -> Result<(), CliError> {
    let args = planning.args;
    let wanted = |choice| Wanted {
        choice,
        length: planning.length,
        new_tokens: args.max_new_tokens.get(),
        kv: args.kv,
    };
    let positions = planning.length.saturating_add(args.max_new_tokens.get());
    let most = planning.model.positions_max;
    if positions > most {
        return Err(CliError::Usage(format!(
            "--seq-len and --max-new-tokens are {positions} positions together, and the model has {most}"
        )));
    }
    let chosen = Choice {
        weights: args.weights,
        offload: args.offload.unwrap_or(Offload::Disk),
        batch: args.batch_size.get(),
    };
    let choices = choices(planning, chosen, wanted);
    let planned = of(planning, wanted(chosen)).map_err(|error| {
        let error = advise(error, || alternatives(planning, wanted(chosen)));
        let error = planning.with_disk_space(error, |roomier| {
            let wanted = wanted(chosen);
            let positions = (wanted.length, wanted.length + wanted.new_tokens);
            Ok(outlook(roomier, wanted, positions, WindowOverrides::default())?.memory)
        });
        with_alternatives(error, &choices)
    })?;
    planning.warn_of_host_memory(&planned.outlook);
    if args.json {
        return print_json(&document(planning, &planned, &choices));
    }
    print_text(text(planning, &planned, &choices).trim_end())
}

/// Of a pass over so many positions, with so many in the cache in the end.
fn outlook(
    planning: &Planning<'_>,
    Wanted { choice, kv, .. }: Wanted,
    (length, cache_length): (usize, usize),
    windows: WindowOverrides,
) -> Result<Outlook, EngineError> {
    let limits =
        BatchLimits { sequences: choice.batch, length, micro_batches: 1, cache_length, cache_pages: 0 };
    let config = EngineConfig {
        kv_tier: session::kv_tier(kv),
        overrides: windows,
        ..planning.config(choice.offload, limits)
    };
    let blocks = Model::stored_as(planning.model.clone(), session::quant_format(choice.weights)).blocks;
    let sample = TokenBatch::new(&planning.model).shape(choice.batch, length);
    Engine::outlook(config, &planning.backend, blocks, &sample, &PlanningRuns::default())
}

fn of(planning: &Planning<'_>, wanted: Wanted) -> Result<Planned, EngineError> {
    let Wanted { choice, length: prompt, new_tokens, .. } = wanted;
    planning.countable(choice.batch)?;
    let most = prompt + new_tokens;
    let outlook = |length, cache_length, windows| outlook(planning, wanted, (length, cache_length), windows);
    let mut prompts = outlook(prompt, most, Default::default())?;
    planning.enough_disk(&prompts.memory)?;
    let mut token = outlook(1, most, prompts.windows)?;
    // The cache has room for all of it, and a query sees what is there: in a prompt itself, later half of what is to come.
    let middle = (prompt + new_tokens / 2).max(1);
    for (pass, length, sees) in [(&mut prompts, prompt, prompt), (&mut token, 1, middle)] {
        pass.work.operations = outlook(length, sees, pass.windows)?.work.operations;
    }
    let positions = |each: usize| (choice.batch * each) as u64;
    add_cache(&mut prompts, 0, positions(prompt));
    add_cache(&mut token, positions(prompt + new_tokens / 2), positions(1));
    let can = planning.capabilities(None, session::quant_format(choice.weights));
    let floors = [&prompts, &token].map(|outlook| Floor::complete(&outlook.work, &can, planning.on_card));
    Ok(Planned { choice, outlook: prompts, floors, token })
}

/// Adds the keys and values that a pass moves: of positions that were there before, and of those that it adds.
fn add_cache(outlook: &mut Outlook, before: u64, added: u64) {
    let Outlook { work, kv_bytes, kv_away_bytes, kv_disk_bytes, .. } = outlook;
    let both = before + added;
    work.disk_read_bytes += before * *kv_disk_bytes;
    work.disk_write_bytes += added * *kv_disk_bytes;
    work.memory_bytes += both * *kv_disk_bytes;
    if work.unified {
        work.memory_bytes += both * *kv_bytes;
        return;
    }
    work.device_memory_bytes += both * *kv_bytes;
    work.upload_bytes += before * *kv_away_bytes;
    work.download_bytes += added * *kv_away_bytes;
    work.memory_bytes += both * *kv_away_bytes;
}

/// Each of them makes the plan fit: for each flag the smallest change, found by trying it.
fn alternatives(planning: &Planning<'_>, wanted: Wanted) -> Vec<String> {
    let fits = |wanted: Wanted| of(planning, wanted).is_ok();
    let with = |choice: Choice| Wanted { choice, ..wanted };
    let Choice { weights, offload, batch } = wanted.choice;
    let mut found = Vec::new();
    let mut places = [Offload::Host, Offload::Disk].into_iter().filter(|place| *place != offload);
    let place = places.find(|&offload| fits(with(Choice { offload, ..wanted.choice })));
    found.extend(place.map(|place| format!("use --offload {}", name(place))));
    let weights =
        first_after(WEIGHT_FORMATS, weights, |weights| fits(with(Choice { weights, ..wanted.choice })));
    found.extend(weights.map(|format| format!("use --weights {}", name(format))));
    let kv = first_after(KV_TIERS, wanted.kv, |kv| fits(Wanted { kv, ..wanted }));
    found.extend(kv.map(|tier| format!("use --kv {}", name(tier))));
    let batch = largest_below(batch, |batch| fits(with(Choice { batch, ..wanted.choice })));
    let length = largest_below(wanted.length, |length| fits(Wanted { length, ..wanted }));
    let new = largest_below(wanted.new_tokens, |new_tokens| fits(Wanted { new_tokens, ..wanted }));
    let numbers = [("--batch-size", batch), ("--seq-len", length), ("--max-new-tokens", new)];
    let numbers = numbers.iter().filter_map(|(flag, value)| Some(format!("{flag} to {}", (*value)?)));
    any_of(found, &numbers.collect::<Vec<_>>())
}

fn choices(planning: &Planning<'_>, chosen: Choice, wanted: impl Fn(Choice) -> Wanted) -> Choices {
    let mut found = Vec::new();
    for weights in WEIGHT_FORMATS {
        for offload in planning.places(chosen.offload) {
            for batch in BATCHES {
                let choice = Choice { weights, offload, batch: batch * chosen.batch };
                found.push((choice, of(planning, wanted(choice))));
            }
        }
    }
    found
}

fn fastest(choices: &Choices) -> Option<usize> {
    first_best(choices.iter().map(|(_, planned)| planned.as_ref().ok().and_then(Planned::speed)))
}

fn text(planning: &Planning<'_>, planned: &Planned, choices: &Choices) -> String {
    let (mut text, outlook, work) = (String::new(), &planned.outlook, &planned.token.work);
    let mut line = |words: String| text += &format!("{words}\n");
    line(shape::words(&planning.model, outlook.parameters));
    let Choice { weights, offload, batch } = planned.choice;
    line(format!(
        "weights {} on {}, key/value cache on {}; {batch} prompts of {} tokens, {} new tokens each",
        name(weights),
        name(offload),
        name(planning.args.kv),
        planning.length,
        planning.args.max_new_tokens
    ));
    line(session::describe_plan(&outlook.memory));
    line(outlook.summary.clone());
    line(format!("what goes where:\n{}", placement::table(&outlook.placement)));
    line(format!(
        "a token for each: {} operations; disk {} read, {} written; link {} up, {} down; host memory {}; device memory {}",
        exponent(work.operations),
        ByteSize(work.disk_read_bytes),
        ByteSize(work.disk_write_bytes),
        ByteSize(work.upload_bytes),
        ByteSize(work.download_bytes),
        ByteSize(work.memory_bytes),
        ByteSize(work.device_memory_bytes)
    ));
    let [prompts, token] = &planned.floors;
    for (name, seconds) in &token.seconds {
        line(format!("  {name:<13} {:>10}", time(*seconds)));
    }
    line(match (token.bound(), planned.speed()) {
        (Some((bound, seconds)), Some(speed)) => format!(
            "a token for each takes at least {} ({} tok/s in all), bound by {bound}",
            time(seconds),
            count(speed)
        ),
        _ => format!("no time: {}", planning.what_is_missing(token)),
    });
    if let Some((bound, seconds)) = prompts.bound() {
        line(format!("the prompts take at least {}, bound by {bound}", time(seconds)));
    }
    line(format!("\n{HEADER}"));
    let best = fastest(choices);
    for (index, (choice, planned)) in choices.iter().enumerate() {
        line(row(*choice, planned.as_ref().ok(), best == Some(index)));
    }
    text
}

fn document(planning: &Planning<'_>, planned: &Planned, choices: &Choices) -> Value {
    json!({
        "model": ModelShape::of(&planning.model),
        "prompt_tokens": planning.length,
        "max_new_tokens": planning.args.max_new_tokens,
        "kv": planning.args.kv,
        "kv_position_bytes": planned.outlook.kv_bytes,
        "kv_away_position_bytes": planned.outlook.kv_away_bytes,
        "kv_disk_position_bytes": planned.outlook.kv_disk_bytes,
        "plan": planned.figures(),
        "memory": Term::all(&planned.outlook.memory),
        "placement": PlacedGroups::all(&planned.outlook.placement),
        "choices": rows(choices, fastest(choices), Choice::json, Planned::figures),
    })
}

impl Planned {
    /// New tokens a second, of all prompts together.
    fn speed(&self) -> Option<f64> {
        self.floors[1].bound().map(|(_, seconds)| self.choice.batch as f64 / seconds)
    }

    fn figures(&self) -> Value {
        let (work, [prompts, token]) = (&self.token.work, &self.floors);
        let Totals { host, device, disk } = Totals::new(&self.outlook.memory);
        let mut row = self.choice.json();
        let more = json!({
            "host_bytes": host,
            "device_bytes": device,
            "disk_bytes": disk,
            "operations": work.operations,
            "disk_read_bytes": work.disk_read_bytes,
            "disk_write_bytes": work.disk_write_bytes,
            "upload_bytes": work.upload_bytes,
            "download_bytes": work.download_bytes,
            "memory_bytes": work.memory_bytes,
            "device_memory_bytes": work.device_memory_bytes,
            "seconds": token.seconds.iter().copied().collect::<std::collections::BTreeMap<_, _>>(),
            "unknown": token.unknown,
            "token_seconds": token.bound().map(|(_, seconds)| seconds),
            "bound_by": token.bound().map(|(bound, _)| bound),
            "tokens_per_second": self.speed(),
            "prompt_seconds": prompts.bound().map(|(_, seconds)| seconds),
        });
        if let (Some(row), Value::Object(more)) = (row.as_object_mut(), more) {
            row.extend(more);
        }
        row
    }
}

impl Choice {
    fn json(self) -> Value {
        json!({ "weights": self.weights, "offload": self.offload, "batch_size": self.batch })
    }
}

fn row(choice: Choice, planned: Option<&Planned>, fastest: bool) -> String {
    let start = format!("{:<8} {:<7} {:>6}", name(choice.weights), name(choice.offload), choice.batch);
    let Some(planned) = planned else { return format!("{start}   does not fit") };
    let size = |tier| ByteSize(planned.outlook.memory.total(tier)).to_string();
    let seconds = planned.floors[1].bound().map_or("–".into(), |(_, seconds)| time(seconds));
    let speed = planned.speed().map_or("–".into(), count);
    format!(
        "{start} {:>11} {:>11} {:>11} {seconds:>10} {speed:>10}{}",
        size(Tier::Host),
        size(Tier::Device),
        size(Tier::Disk),
        if fastest { "  ← fastest" } else { "" }
    )
}

/// A refusal, with the choices that would do.
fn with_alternatives(error: EngineError, choices: &Choices) -> CliError {
    let fitting: Vec<String> = choices
        .iter()
        .filter_map(|(choice, planned)| Some(row(*choice, Some(planned.as_ref().ok()?), false)))
        .collect();
    super::plan_refusal::and_what_fits(error, "weight format, place or batch", HEADER, &fitting)
}
