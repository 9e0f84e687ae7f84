//! Settings tried one after the other, leaving out what cannot win.
//!
//! For each direction: every block size with the first engine and number of rings, each at rising depths until two steps
//! in a row gained less than 3 %; then, on the best block size only, the other rings, engines and unregistered memory.

use crate::failure::Failure;
use crate::files::{DataFile, FilePlan};
use crate::html;
use crate::interrupt::Interrupt;
use crate::measure::{self, Measured, Session, Settings, Workload};
use crate::memory;
use crate::options::{self, GridArgs, Register, Sweep};
use crate::progress::Meter;
use crate::report::{self, Findings};
use crate::run;
use crate::units;
use serde_json::{Value, json};
use terrace_aio::bench::load::Timing;
use terrace_aio::bench::mix::Direction;
use terrace_aio::engine::QUEUE_DEPTH_MAX;

/// A step that gains less than this is flat.
const GAIN_MIN: f64 = 1.03;
/// Flat steps in a row that end a climb.
const FLAT_STEPS: u32 = 2;
/// Points this close to the best rate count as equal; the one that takes the least processor time wins.
const EQUAL: f64 = 0.97;

/// Decides when deeper queues no longer pay.
#[derive(Debug, Default)]
pub struct Climb {
    best: f64,
    flat: u32,
}

/// Every point that was measured.
#[derive(Debug, Default)]
pub struct Points {
    pub all: Vec<Measured>,
    pub notes: Vec<String>,
    /// Points of the grid that were left out.
    pub skipped: usize,
    interrupted: bool,
}

/// The settings to try.
#[derive(Debug)]
pub struct Grid {
    blocks: Vec<u64>,
    depths: Vec<usize>,
    variants: Vec<Settings>,
    seconds: f64,
    random: bool,
    seed: u64,
}

impl Climb {
    /// Whether to go on after a point with this rate.
    pub fn goes_on(&mut self, rate: f64) -> bool {
        self.flat = if rate < self.best * GAIN_MIN { self.flat + 1 } else { 0 };
        self.best = self.best.max(rate);
        self.flat < FLAT_STEPS
    }
}

impl Grid {
    /// The grid of these arguments; its first variant is the one every block size is tried with.
    pub fn new(args: &GridArgs, random: bool, seed: u64, dirs: usize) -> Result<Self, Failure> {
        let sorted = |mut depths: Vec<usize>| {
            depths.sort_unstable();
            depths.dedup();
            depths
        };
        let depths = sorted(args.queue_depths.iter().map(|depth| *depth as usize).collect());
        if depths.last().is_some_and(|depth| depth * dirs > QUEUE_DEPTH_MAX) {
            let text = format!("--queue-depths times the directories must be at most {QUEUE_DEPTH_MAX}");
            return Err(Failure::usage(text));
        }
        let registered: &[bool] = match args.registered {
            Register::Yes => &[true],
            Register::No => &[false],
            Register::Both => &[true, false],
        };
        let mut variants: Vec<Settings> = Vec::new();
        for engine in &args.engines {
            let is_threads = *engine == options::Engine::Threads;
            // Rings and registration mean nothing to threads.
            let (rings, registered) =
                if is_threads { (&args.rings[..1], &registered[..1]) } else { (&args.rings[..], registered) };
            for (rings, register) in
                rings.iter().flat_map(|rings| registered.iter().map(move |r| (*rings, *r)))
            {
                variants.push(Settings {
                    engine: engine.choice(),
                    block_bytes: args.block_sizes[0],
                    queue_depth: 1,
                    rings: rings as usize,
                    threads: None,
                    register,
                    sq_poll: false,
                    io_poll: false,
                    direct: !args.buffered,
                });
            }
        }
        let blocks = args.block_sizes.clone();
        Ok(Self { blocks, depths, variants, seconds: args.seconds, random, seed })
    }

    /// What the files' length is a multiple of.
    pub fn block_max(&self) -> u64 {
        self.blocks.iter().copied().max().unwrap_or(1 << 20)
    }

    /// Refuses a grid of which no point fits these files, for there would be nothing to measure, or some point does not fit in memory.
    pub fn check_fits(&self, plan: &FilePlan) -> Result<(), Failure> {
        let block = self.blocks.iter().copied().min().unwrap_or(1);
        let depth = self.depths.first().copied().unwrap_or(1);
        let blocks = plan.data_bytes / block;
        if blocks >= depth as u64 {
            let bytes = self.in_flight_bytes(plan.data_bytes) * plan.dirs.len() as u64;
            return memory::check(bytes, "--queue-depths or --block-sizes");
        }
        Err(Failure::usage(format!(
            "a file has {blocks} blocks of {}, fewer than the lowest depth, {depth}: raise --file-size, or lower --queue-depths or \
             --block-sizes",
            units::size(block)
        )))
    }

    /// Bytes of the blocks in flight in a file of `data_bytes` at most: a depth beyond the file's blocks is not tried.
    fn in_flight_bytes(&self, data_bytes: u64) -> u64 {
        let deepest = |block: &u64| {
            let fitting = self.depths.iter().filter(|depth| **depth as u64 <= data_bytes / block);
            fitting.max().map_or(0, |depth| *depth as u64 * block)
        };
        self.blocks.iter().map(deepest).max().unwrap_or(0)
    }

    /// Measures one direction.
    pub fn explore(
        &self,
        direction: Direction,
        files: &mut [DataFile],
        points: &mut Points,
        meter: &mut Meter,
    ) -> Result<(), Failure> {
        for block in &self.blocks {
            self.climb(&self.variants[0], *block, &self.depths, (direction, &mut *files), points, meter)?;
        }
        let Some(best) = points.best(direction) else { return Ok(()) };
        let (block, depth) = (best.settings.block_bytes, best.settings.queue_depth);
        // A variant that needs a shallower queue starts one step lower; what lies below is dominated.
        let from = self.depths.iter().position(|d| *d >= depth).unwrap_or(0).saturating_sub(1);
        for variant in &self.variants[1..] {
            if !points.twin_was_unregistered(variant) {
                self.climb(variant, block, &self.depths[from..], (direction, &mut *files), points, meter)?;
            }
        }
        let tried = points.all.iter().filter(|point| point.workload.direction == direction).count();
        points.skipped += self.variants.len() * self.blocks.len() * self.depths.len() - tried;
        Ok(())
    }

    fn climb(
        &self,
        variant: &Settings,
        block: u64,
        depths: &[usize],
        (direction, files): (Direction, &mut [DataFile]),
        points: &mut Points,
        meter: &mut Meter,
    ) -> Result<(), Failure> {
        let mut climb = Climb::default();
        for depth in depths {
            let settings = Settings { block_bytes: block, queue_depth: *depth, ..variant.clone() };
            let too_deep = files.iter().any(|file| file.data_bytes / block < *depth as u64);
            if meter.interrupt.requested() || too_deep {
                return Ok(());
            }
            let measured = self.measure(&settings, direction, files, meter)?;
            if measured.tally.interrupted {
                return Ok(());
            }
            let goes_on = climb.goes_on(measured.gigabytes_per_second());
            points.all.push(measured);
            if !goes_on {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Measures one point.
    pub fn measure(
        &self,
        settings: &Settings,
        direction: Direction,
        files: &mut [DataFile],
        meter: &mut Meter,
    ) -> Result<Measured, Failure> {
        let what =
            format!("{} {} x {}", direction.name(), units::size(settings.block_bytes), settings.queue_depth);
        meter.start(&what, self.seconds);
        let workload =
            Workload { direction, random: self.random, seed: self.seed, validate: false, loops: None };
        let session = Session::open(settings, files)?;
        session.measure(files, workload, Timing::of(self.seconds / 5.0, self.seconds), meter)
    }
}

impl Points {
    /// The best point of a direction.
    pub fn best(&self, direction: Direction) -> Option<&Measured> {
        let of_direction = || self.all.iter().filter(|point| point.workload.direction == direction);
        let best = of_direction().map(Measured::gigabytes_per_second).fold(0.0, f64::max);
        let equal = of_direction().filter(|point| point.gigabytes_per_second() >= EQUAL * best);
        equal.min_by(|a, b| a.cpu_seconds_per_gigabyte().total_cmp(&b.cpu_seconds_per_gigabyte()))
    }

    /// Whether a variant without registration is what the same with it was: where nothing can be registered, asking for it or not is the same.
    fn twin_was_unregistered(&self, variant: &Settings) -> bool {
        let is_twin = |settings: &Settings| {
            settings.register && settings.engine == variant.engine && settings.rings == variant.rings
        };
        let mut twins = self.all.iter().filter(|point| is_twin(&point.settings)).peekable();
        !variant.register && twins.peek().is_some() && twins.all(|point| !point.is_registered)
    }

    /// The directions in the order they were measured.
    pub fn directions(&self) -> Vec<Direction> {
        let mut directions: Vec<Direction> = self.all.iter().map(|point| point.workload.direction).collect();
        directions.dedup();
        directions
    }
}

impl Findings for Points {
    /// The table and the best of each direction.
    fn text(&self) -> String {
        let header =
            ["", "engine", "block", "depth", "rings", "registered", "GB/s", "IOPS", "p99", "CPU s/GB"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        rows.extend(self.all.iter().map(row_of));
        let mut text = report::table(&rows);
        for direction in self.directions() {
            if let Some(best) = self.best(direction) {
                text += &format!(
                    "best {}: {:.3} GB/s with {} x {}, {}, {} ring(s), {}\n",
                    best.title(),
                    best.gigabytes_per_second(),
                    units::size(best.settings.block_bytes),
                    best.settings.queue_depth,
                    best.engine,
                    best.settings.rings,
                    if best.is_registered { "registered" } else { "not registered" },
                );
            }
        }
        text += &format!(
            "{} points of the grid left out because they could not win or did not fit\n",
            self.skipped
        );
        self.notes.iter().for_each(|note| text += &format!("note: {note}\n"));
        text
    }

    fn json(&self) -> Value {
        let best = self
            .directions()
            .into_iter()
            .filter_map(|direction| Some((direction.name().to_owned(), point_json(self.best(direction)?))));
        json!({
            "best": best.collect::<serde_json::Map<_, _>>(),
            "points": self.all.iter().map(point_json).collect::<Vec<_>>(),
            "skipped": self.skipped,
            "interrupted": self.interrupted,
            "notes": self.notes,
        })
    }

    fn csv(&self) -> String {
        let rows: String = self.all.iter().map(report::csv_result).collect();
        format!("{}\n{rows}", report::CSV_HEADER)
    }

    fn html(&self) -> String {
        html::sweep_page(self)
    }
}

/// Sweeps and reports. Gives the exit code.
pub fn run(options: &Sweep, interrupt: Interrupt) -> Result<u8, Failure> {
    report::check_output(&options.output)?;
    let place = &options.place;
    options.shape.check()?;
    let grid = Grid::new(&options.grid, options.shape.random, place.seed, place.dirs.len())?;
    let plan = place.files(grid.block_max(), options.shape.blocks_min(), 1)?;
    grid.check_fits(&plan)?;
    let mut files = plan.open()?;
    let mut meter = Meter::new(interrupt);
    let mut points = Points::default();
    let outcome = prepare(&grid, &mut files, &mut points, &mut meter).and_then(|()| {
        let directions = options.shape.directions();
        directions.into_iter().try_for_each(|d| grid.explore(d, &mut files, &mut points, &mut meter))
    });
    let finished = outcome.and_then(|()| run::finish(&mut files, &grid.variants[0], &mut meter));
    meter.clear();
    points.interrupted = meter.interrupt.requested();
    report::publish(&options.output, &points)?;
    finished.map(|()| if points.interrupted { 130 } else { 0 })
}

/// Fills the files and notes what a reader must know about them.
pub fn prepare(
    grid: &Grid,
    files: &mut [DataFile],
    points: &mut Points,
    meter: &mut Meter,
) -> Result<(), Failure> {
    meter.start_pass("writing the files");
    let first = &grid.variants[0];
    measure::stamp(files, !first.direct, meter)?;
    points.notes = run::notes(&Session::open(first, files)?, files);
    Ok(())
}

fn row_of(point: &Measured) -> Vec<String> {
    let settings = &point.settings;
    vec![
        point.title(),
        point.engine.clone(),
        units::size(settings.block_bytes),
        settings.queue_depth.to_string(),
        settings.rings.to_string(),
        if point.is_registered { "yes" } else { "no" }.to_owned(),
        format!("{:.3}", point.gigabytes_per_second()),
        format!("{:.0}", point.iops()),
        units::latency(point.latency().quantile(0.99)),
        format!("{:.4}", point.cpu_seconds_per_gigabyte()),
    ]
}

fn point_json(point: &Measured) -> Value {
    let settings = &point.settings;
    let mut document = json!({
        "direction": point.workload.direction.name(),
        "mix": point.workload.direction.mix().map(|mix| mix.to_string()),
        "engine": point.engine,
        "block_bytes": settings.block_bytes,
        "queue_depth": settings.queue_depth,
        "rings": settings.rings,
        "registered": point.is_registered,
        "direct": point.is_direct,
        "gigabytes_per_second": point.gigabytes_per_second(),
        "iops": point.iops(),
        "cpu_seconds_per_gigabyte": point.cpu_seconds_per_gigabyte(),
    });
    if let Value::Object(map) = &mut document {
        map.extend(report::latency_json(&point.latency()));
    }
    document
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of these rates are measured.
    fn measured(rates: &[f64]) -> usize {
        let mut climb = Climb::default();
        rates.iter().position(|rate| !climb.goes_on(*rate)).map_or(rates.len(), |last| last + 1)
    }

    #[test]
    fn a_climb_ends_after_two_flat_steps() {
        assert_eq!(measured(&[1.0, 2.0, 4.0, 8.0, 16.0]), 5);
        assert_eq!(measured(&[1.0, 2.0, 2.02, 2.03, 9.0]), 4);
        assert_eq!(measured(&[1.0, 2.0, 2.01, 3.0, 3.01, 2.9, 9.0]), 6, "a gain in between starts over");
        assert_eq!(measured(&[2.0, 1.0, 1.0, 1.0]), 3, "falling is flat");
        assert_eq!(measured(&[0.0, 0.0]), 2);
    }
}
