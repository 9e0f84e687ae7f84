//! The plain command: each direction once.

use crate::failure::Failure;
use crate::files::DataFile;
use crate::interrupt::Interrupt;
use crate::measure::{self, Measured, Session, Settings, Workload};
use crate::memory;
use crate::options::{Engine, Run};
use crate::progress::Meter;
use crate::report::{self, Report};
use terrace_aio::bench::load::{Tally, Timing};
use terrace_aio::bench::mix::Direction;
use terrace_aio::bench::space;
use terrace_aio::engine::{EngineChoice, QUEUE_DEPTH_MAX};
use terrace_aio::memory::HostMemory;

/// Twice the depth is tried only up to this many operations in flight in a directory.
const PROBE_DEPTH_MAX: usize = 512;

/// Measures and reports. Gives the exit code.
pub fn run(options: &Run, interrupt: Interrupt) -> Result<u8, Failure> {
    options.foreign.check()?;
    options.shape.check()?;
    report::check_output(&options.output)?;
    let (settings, notes) = settings(options)?;
    let plan = options.place.files(settings.block_bytes, options.shape.blocks_min(), 1)?;
    memory::check_settings(&settings, &plan)?;
    let mut files = plan.open()?;
    let mut report =
        Report { file_bytes: plan.data_bytes, notes, validated: options.validate, ..Report::default() };
    let mut meter = Meter::new(interrupt);
    let outcome = measure_all(options, &settings, &mut files, &mut report, &mut meter);
    report.interrupted = meter.interrupt.requested();
    let finished = outcome.and_then(|()| finish(&mut files, &settings, &mut meter));
    meter.clear();
    // What was measured before a failure is worth having.
    publish(options, &report)?;
    finished?;
    Ok(exit_code(&report))
}

fn settings(options: &Run) -> Result<(Settings, Vec<String>), Failure> {
    let mut settings = options.engine.settings(&options.load, options.place.dirs.len())?;
    let mut notes = Vec::new();
    if let Some(queues) = options.foreign.io_parallel {
        settings.queue_depth *= queues as usize;
        let depth = settings.queue_depth;
        if depth * options.place.dirs.len() > QUEUE_DEPTH_MAX {
            return Err(Failure::usage(format!(
                "--queue-depth times --io_parallel times the directories must be at most {QUEUE_DEPTH_MAX}: lower one of them"
            )));
        }
        if settings.engine == EngineChoice::Threads {
            notes.push(format!("--io_parallel {queues} means --queue-depth {depth} here"));
        } else {
            settings.rings = queues as usize;
            notes.push(format!(
                "--io_parallel {queues} means --rings {queues} and --queue-depth {depth} here"
            ));
        }
    }
    Ok((settings, notes))
}

fn measure_all(
    options: &Run,
    settings: &Settings,
    files: &mut [DataFile],
    report: &mut Report,
    meter: &mut Meter,
) -> Result<(), Failure> {
    meter.start_pass("writing the files");
    measure::stamp(files, !settings.direct, meter)?;
    let session = Session::open(settings, files)?;
    report.notes.extend(notes(&session, files));
    if options.engine.engine == Engine::Auto {
        let found = if session.has_threads() { Engine::Threads } else { Engine::Uring };
        let idle = options.engine.idle_flags(found).into_iter();
        report.notes.extend(idle.map(|flag| format!("{flag} did nothing with the engine that was found")));
    }
    for direction in options.shape.directions() {
        if meter.interrupt.requested() {
            break;
        }
        let measured = measure_one(options, &session, files, direction, report, meter)?;
        report.add_mismatches(&measured.tally);
        if measured.depth < settings.queue_depth * files.len() && report.results.is_empty() {
            report
                .notes
                .push("the files have fewer blocks than --queue-depth: all of them were in flight".into());
        }
        // Cut off during the warm-up, there is nothing to report.
        if measured.tally.seconds > 0.0 {
            report.results.push(measured);
        }
        if options.validate && direction.writes() && !meter.interrupt.requested() {
            meter.start_pass("reading back");
            report.add_mismatches(&measure::verify(files, !settings.direct, meter)?);
        }
    }
    if let Some(result) = report.results.first() {
        let fallbacks: Vec<String> =
            result.facts.fallbacks.iter().map(|why| format!("engine: {why}")).collect();
        report.notes.extend(fallbacks);
    }
    Ok(())
}

fn measure_one(
    options: &Run,
    session: &Session,
    files: &mut [DataFile],
    direction: Direction,
    report: &mut Report,
    meter: &mut Meter,
) -> Result<Measured, Failure> {
    let (seconds, mut warm_up) = options.load.times(if options.sustained { 60.0 } else { 5.0 });
    if options.sustained && options.load.warm_up.is_none() {
        warm_up = 0.0;
    }
    let workload = Workload {
        direction,
        random: options.shape.random,
        seed: options.place.seed,
        validate: options.validate,
        loops: options.loops,
    };
    meter.start(direction.name(), seconds);
    let mut measured = session.measure(files, workload, Timing::of(warm_up, seconds), meter)?;
    if options.sustained {
        measured.examine_series();
    } else if !options.no_probe && options.loops.is_none() && !meter.interrupt.requested() {
        measured.gain_at_twice_the_depth = probe(&measured, files, seconds, report, meter)?;
    }
    Ok(measured)
}

/// The rate at twice the depth as a multiple of the measured one.
fn probe(
    measured: &Measured,
    files: &mut [DataFile],
    seconds: f64,
    report: &mut Report,
    meter: &mut Meter,
) -> Result<Option<f64>, Failure> {
    let mut settings = measured.settings.clone();
    settings.queue_depth *= 2;
    let has_blocks = |file: &DataFile| file.data_bytes / settings.block_bytes >= settings.queue_depth as u64;
    let rate = measured.gigabytes_per_second();
    let is_too_deep =
        settings.queue_depth > PROBE_DEPTH_MAX || settings.queue_depth * files.len() > QUEUE_DEPTH_MAX;
    if is_too_deep || !files.iter().all(has_blocks) || rate == 0.0 {
        return Ok(None);
    }
    let bytes = memory::in_flight_bytes(&settings, files[0].data_bytes, files.len());
    if memory::is_too_much(bytes, HostMemory::now().available) {
        let note =
            "twice the depth was not tried: its blocks take more than half of the memory that is available";
        if !report.notes.iter().any(|other| other == note) {
            report.notes.push(note.to_owned());
        }
        return Ok(None);
    }
    let length = (seconds / 4.0).clamp(0.05, 1.0);
    let session = Session::open(&settings, files)?;
    let deeper = session.measure(files, measured.workload, Timing::of(length / 4.0, length), meter)?;
    report.add_mismatches(&deeper.tally);
    Ok((!deeper.tally.interrupted).then(|| deeper.gigabytes_per_second() / rate))
}

/// What a reader must know about where the files are.
pub fn notes(session: &Session, files: &[DataFile]) -> Vec<String> {
    let refused = session.refusals(files).map(|(dir, why)| {
        let dir = dir.display();
        format!(
            "{dir}: the file system refuses direct I/O ({why}); these figures went through the page cache"
        )
    });
    let in_memory = files.iter().filter(|file| space::is_in_memory(&file.dir));
    let in_memory = in_memory.map(|file| {
        format!("{}: this is a file system in memory; these figures are not a drive's", file.dir.display())
    });
    refused.chain(in_memory).collect()
}

/// Leaves kept files with content that a later run can check.
pub fn finish(files: &mut [DataFile], settings: &Settings, meter: &mut Meter) -> Result<(), Failure> {
    if files.iter().any(DataFile::is_kept) && !meter.interrupt.requested() {
        meter.start_pass("restoring the files");
        measure::stamp(files, !settings.direct, meter)?;
    }
    Ok(())
}

impl Report {
    fn add_mismatches(&mut self, tally: &Tally) {
        self.mismatches_count += tally.mismatches_count;
        for mismatch in &tally.mismatches {
            if !self.mismatches.contains(mismatch) {
                self.mismatches.push(mismatch.clone());
            }
        }
    }
}

fn publish(options: &Run, report: &Report) -> Result<(), Failure> {
    report::publish(&options.output, report)?;
    for mismatch in &report.mismatches {
        let (path, offset) = (mismatch.path.display(), mismatch.offset);
        eprintln!("aio-bench: {path} does not hold what was written to it at offset {offset}");
    }
    if report.mismatches_count > 0 {
        eprintln!("aio-bench: {} block(s) failed validation", report.mismatches_count);
    }
    Ok(())
}

fn exit_code(report: &Report) -> u8 {
    if report.mismatches_count > 0 {
        1
    } else if report.interrupted {
        130
    } else {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::FilePlan;
    use std::os::unix::fs::FileExt;

    #[test]
    fn what_the_probe_reads_is_checked_too() {
        let dir = tempfile::tempdir().unwrap();
        let plan = FilePlan {
            dirs: vec![dir.path().to_owned()],
            data_bytes: 1 << 20,
            keep: false,
            reuse: false,
            reserve: Some(0),
            seed: 1,
            copies: 1,
        };
        let (mut files, mut meter) = (plan.open().unwrap(), Meter::new(Interrupt::default()));
        measure::stamp(&mut files, false, &mut meter).unwrap();
        let settings = Settings {
            engine: EngineChoice::Threads,
            block_bytes: 64 << 10,
            queue_depth: 2,
            rings: 1,
            threads: None,
            register: false,
            sq_poll: false,
            io_poll: false,
            direct: true,
        };
        let session = Session::open(&settings, &files).unwrap();
        let workload =
            Workload { direction: Direction::Read, random: false, seed: 0, validate: true, loops: Some(1) };
        let measured = session.measure(&mut files, workload, Timing::of_passes(), &mut meter).unwrap();
        assert_eq!(measured.tally.mismatches_count, 0);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(files[0].open_path()).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, 300_000).unwrap();
        file.write_all_at(&[byte[0] ^ 1], 300_000).unwrap();
        file.sync_all().unwrap();
        let mut report = Report::default();
        let gain = probe(&measured, &mut files, 0.1, &mut report, &mut meter).unwrap();
        assert!(gain.is_some());
        assert_eq!((report.mismatches_count, report.mismatches[0].offset), (1, 300_000));
        assert_eq!(exit_code(&report), 1);
    }
}
