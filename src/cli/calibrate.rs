//! `terrace calibrate`: what disks, memory, processor and card can do, measured and written down.

use super::args::{CalibrateArgs, PlacementArgs};
use super::session::Session;
use super::{checks, print_json};
use crate::calibrate::measure::{self, Effort, LAYOUTS, MeasureError};
use crate::calibrate::{Calibration, Gemm, Machine, Profile, TrainingRate, card};
use crate::error::CliError;
use crate::progress::{count, duration};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;
use terrace_aio::engine::EngineConfig as IoConfig;
use terrace_aio::profile::{DiskProfile, can_name};
use terrace_device::host::HostDevice;
use terrace_device::{Device, StreamKind};
use terrace_kernels::{DType, QuantFormat, cpu};

/// What products are measured of: all that runs compute with.
const DTYPES: [DType; 3] = [DType::BF16, DType::F16, DType::F32];
/// The same of weights.
const FORMATS: [QuantFormat; 2] = [QuantFormat::Int8, QuantFormat::Int4];

/// Runs the command.
///
/// # Errors
/// A directory, the output or the device cannot be used.
pub fn calibrate(args: &CalibrateArgs, threads: Option<NonZeroUsize>) -> Result<(), CliError> {
    let output = output(args)?;
    let began = Instant::now();
    let (known, lost) = Profile::salvage(&output);
    if let Some(why) = lost {
        let has_disks = known.disk.is_some() || !args.disk.is_empty();
        let disks = if has_disks { "" } else { "; give --disk PATH for rates of disks" };
        eprintln!("note: {}: {why}; what cannot be read of it is replaced{disks}", output.display());
    }
    // The settings that `aio-bench tune` found, if the profile has them, else the defaults.
    let io = known.disk.as_ref().map_or_else(IoConfig::default, DiskProfile::engine_config);
    let placement = PlacementArgs { device: args.device, engine: args.engine, ..PlacementArgs::default() };
    let session = Session::open(&placement, &io, threads, false)?;
    let machine = Machine::here(session.threads, session.card().map(|(name, _)| name));
    let effort = if args.quick { Effort::QUICK } else { Effort::FULL }.beyond_caches();
    let effort = if args.sustained { effort.sustained() } else { effort };
    let mut calibration = Calibration::new(machine, args.quick);
    // Without disks their section stays what it was.
    let stays = known.calibration.is_some_and(|earlier| earlier.sustained);
    calibration.sustained = args.sustained || (args.disk.is_empty() && stays);
    let disk = match &args.disk[..] {
        [] => None,
        dirs => {
            let disks = measure::open_disks(&session.io_config, dirs, effort).map_err(CliError::failed)?;
            let (disk, together, notes) = measure::disks(&disks).map_err(CliError::failed)?;
            notes.iter().for_each(|note| eprintln!("note: {note}"));
            calibration.disks_together = (dirs.len() > 1).then_some(together);
            // With a card the cores have nothing to compute that disks could take them from.
            if !session.on_card() {
                let (backend, threads) = (&session.backend, session.threads);
                let found = measure::disks_beside_products(backend, &disks, threads, effort);
                calibration.disk_bytes_per_core_second = found.map_err(CliError::failed)?;
            }
            Some(disk)
        }
    };
    host(&mut calibration, &session, effort).map_err(CliError::failed)?;
    if let Some((_, memory_bytes)) = session.card() {
        let effort = if args.quick { card::Effort::QUICK } else { card::Effort::FULL };
        let (device, kernels) = (&*session.backend.device, &session.backend.kernels);
        let measured = card::measure(device, kernels, memory_bytes, &DTYPES, &FORMATS, effort);
        let mut measured = measured.map_err(CliError::failed)?;
        let notes = card::measure_training(&mut measured, &session.backend, effort.seconds);
        notes.iter().for_each(|note| eprintln!("note: {note}"));
        calibration.card = Some(measured);
    }
    let profile = Profile { disk, calibration: Some(calibration) };
    eprintln!("{}", table(&profile).trim_end());
    let shown = output.display();
    let written = match &args.output {
        Some(_) => profile.write(&output).map_err(|why| format!("--output {shown}: {why}")),
        None => profile.replace(&output).map_err(|why| format!("{shown}: {why}, or give --output FILE")),
    };
    written.map_err(CliError::Failed)?;
    let seconds = began.elapsed().as_secs_f64();
    eprintln!("measured in {}; the profile is in {shown}", duration(seconds));
    if args.output.is_none() {
        eprintln!("later runs on this machine use it; --profile names another");
    }
    if args.json { print_json(&profile.to_json()) } else { Ok(()) }
}

/// Where the profile goes, refused before anything is measured.
fn output(args: &CalibrateArgs) -> Result<PathBuf, CliError> {
    for dir in &args.disk {
        if !dir.is_dir() {
            let detail = "there is no such folder; make it on the disk that is to be measured";
            return Err(CliError::Usage(format!("--disk {}: {detail}", dir.display())));
        }
        if !can_name(dir) {
            let detail =
                "its path is not UTF-8, and a profile cannot name it; give another folder on the same disk";
            return Err(CliError::Usage(format!("--disk {}: {detail}", dir.display())));
        }
    }
    checks::disks(&args.disk)?;
    match &args.output {
        Some(path) => {
            if path.exists()
                && let Err(why) = Profile::read(path)
            {
                let advice = "move it away or name another file";
                return Err(CliError::Usage(format!(
                    "--output {}: the file exists and cannot take a profile: {why}; {advice}",
                    path.display()
                )));
            }
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            if !folder.is_dir() {
                return Err(CliError::Usage(format!(
                    "--output {}: there is no folder {}; make it, or name another file",
                    path.display(),
                    folder.display()
                )));
            }
            checks::writable("--output", folder)?;
            Ok(path.clone())
        }
        None => {
            let path = Profile::default_path().ok_or_else(|| {
                CliError::Usage("there is no HOME to keep the profile in; give --output FILE".into())
            })?;
            if path.is_dir() {
                let detail = "this is a directory, where Terrace keeps its profile; move it away, or give --output FILE";
                return Err(CliError::Failed(format!("{}: {detail}", path.display())));
            }
            let folder = path.parent().unwrap_or(Path::new("/"));
            checks::writable("the folder of profiles", folder)
                .map_err(|error| CliError::Failed(format!("{error}; or give --output FILE")))?;
            Ok(path)
        }
    }
}

fn host(calibration: &mut Calibration, session: &Session, effort: Effort) -> Result<(), MeasureError> {
    let threads = session.threads;
    let pool = measure::pool(threads)?;
    calibration.memory = Some(measure::memory(&pool, effort));
    calibration.checksum_bytes_per_second = Some(measure::checksums(&pool, effort));
    calibration.checksum_bytes_per_core_second = Some(measure::checksums(&measure::pool(1)?, effort));
    for (format, weights) in LAYOUTS {
        calibration.optimizer.push(measure::update(&pool, format, weights, effort)?);
    }
    for dtype in DTYPES {
        calibration.gemm.extend(host_gemm(threads, dtype, effort, usize::MAX)?);
        // A card's training is measured with its other figures.
        if session.on_card() {
            continue;
        }
        let (backend, seconds) = (&session.backend, effort.seconds);
        calibration.training.push(measure::training(
            backend,
            dtype,
            effort.layer.trained(),
            threads,
            seconds,
        )?);
    }
    let (device, kernels) = (HostDevice::unified(), cpu::kernel_set(threads));
    let arena = device.arena(measure::gemm_arena_bytes(effort.layer))?;
    let compute = device.stream(StreamKind::Compute)?;
    for format in FORMATS {
        let (layer, seconds) = (effort.layer, effort.seconds / 2.0);
        calibration
            .gemm
            .extend(measure::quantized(&device, &*compute, &arena, &kernels, format, layer, seconds)?);
    }
    Ok(())
}

/// Products on the CPU.
///
/// # Errors
/// There is no memory for them.
pub(super) fn host_gemm(
    threads: usize,
    dtype: DType,
    effort: Effort,
    only: usize,
) -> Result<Vec<Gemm>, MeasureError> {
    let device = HostDevice::unified();
    let arena = device.arena(measure::gemm_arena_bytes(effort.layer))?;
    let compute = device.stream(StreamKind::Compute)?;
    let kernels = cpu::kernel_set(threads);
    // At the start of a run a part of that would be too short.
    let seconds = (effort.seconds / 3.0).max(Effort::START.seconds / 2.0);
    measure::gemm(&device, &*compute, &arena, &kernels, dtype, effort.layer, seconds, only)
}

/// What was measured, a line each.
fn table(profile: &Profile) -> String {
    let mut text = String::new();
    let mut line = |what: &str, value: String| text += &format!("  {what:<44} {value}\n");
    let bytes = |rate: f64| format!("{:>7.2} GB/s", rate / 1e9);
    let three = |[a, b, c]: [(&str, f64); 3]| {
        format!("{} {}   {} {}   {} {}", bytes(a.1), a.0, bytes(b.1), b.0, bytes(c.1), c.0)
    };
    for entry in profile.disk.iter().flat_map(|disk| &disk.paths) {
        let rates = [
            ("read", entry.read_bytes_per_second),
            ("write", entry.write_bytes_per_second),
            ("mixed", entry.mixed_bytes_per_second),
        ];
        line(&format!("disk {}", entry.path.display()), three(rates));
    }
    let Some(calibration) = &profile.calibration else { return text };
    if let Some(all) = calibration.disks_together {
        let rates = [
            ("read", all.read_bytes_per_second),
            ("write", all.write_bytes_per_second),
            ("mixed", all.mixed_bytes_per_second),
        ];
        line("all disks at once", three(rates));
    }
    if profile.disk.is_none() {
        line("disk", "not measured: give --disk PATH".into());
    }
    if let Some(memory) = calibration.memory {
        let rates = [
            ("read", memory.read_bytes_per_second),
            ("copy", memory.copy_bytes_per_second),
            ("update", memory.update_bytes_per_second),
        ];
        line(&format!("host memory, {} threads", calibration.machine.threads), three(rates));
    }
    let products = |line: &mut dyn FnMut(&str, String), name: &str, gemm: &[Gemm]| {
        let types = DTYPES.map(|dtype| (dtype.to_string(), format!("in {dtype}")));
        let formats = FORMATS.map(|format| (format.to_string(), format!("with {format} weights")));
        for (form, what) in types.into_iter().chain(formats) {
            let rates: Vec<f64> =
                gemm.iter().filter(|g| g.dtype == form).map(|g| g.operations_per_second).collect();
            let (least, most) = rates.iter().fold((f64::MAX, 0.0_f64), |(a, b), &r| (a.min(r), b.max(r)));
            if most > 0.0 {
                let text = format!("{:.1} to {:.1} GFLOP/s, {} shapes", least / 1e9, most / 1e9, rates.len());
                line(&format!("{name}, matrix products {what}"), text);
            }
        }
    };
    let trained = |line: &mut dyn FnMut(&str, String), name: &str, rates: &[TrainingRate]| {
        for rate in rates {
            let what = format!("{name}, a layer forward and backward in {}", rate.dtype);
            line(&what, format!("{:.1} GFLOP/s", rate.operations_per_second / 1e9));
        }
    };
    products(&mut line, "cpu", &calibration.gemm);
    trained(&mut line, "cpu", &calibration.training);
    for rate in &calibration.optimizer {
        let what = format!("update, state {} of {} weights", rate.state, rate.weights);
        line(&what, format!("{} parameters/s", count(rate.parameters_per_second)));
    }
    if let Some(rate) = calibration.checksum_bytes_per_second {
        line("checksums", bytes(rate));
    }
    if let Some(rate) = calibration.disk_bytes_per_core_second {
        line("disks, per core that they take of products", bytes(rate));
    }
    match &calibration.card {
        None => line("card", "none in use".into()),
        Some(card) => {
            let rates = [
                ("up", card.upload_bytes_per_second),
                ("down", card.download_bytes_per_second),
                ("both", card.both_bytes_per_second),
            ];
            line(&format!("link of {}", card.name), three(rates));
            line("memory of the card", bytes(card.device_memory_bytes_per_second));
            products(&mut line, "card", &card.gemm);
            trained(&mut line, "card", &card.training);
        }
    }
    text
}
