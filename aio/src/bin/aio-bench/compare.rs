//! fio beside us: the same settings on files made the same way, the two programs taking turns.

use crate::failure::Failure;
use crate::files::DataFile;
use crate::fio::{self, Figures, Job};
use crate::html;
use crate::interrupt::Interrupt;
use crate::measure::{self, Measured, Session, Settings, Workload};
use crate::memory;
use crate::options::{Compare, Engine};
use crate::progress::Meter;
use crate::report::{self, Findings};
use crate::run;
use serde_json::{Value, json};
use std::path::PathBuf;
use terrace_aio::bench::load::{Side, Timing};
use terrace_aio::bench::mix::Direction;
use terrace_aio::engine::EngineChoice;

/// The pairs of one direction.
#[derive(Debug)]
pub struct Pairs {
    pub direction: Direction,
    /// Ours and fio's.
    pub pairs: Vec<[Figures; 2]>,
}

/// Everything that was compared.
#[derive(Debug, Default)]
pub struct Comparison {
    pub directions: Vec<Pairs>,
    pub notes: Vec<String>,
    settings: Value,
    interrupted: bool,
}

/// One of the figures.
type Figure = fn(&Figures) -> f64;

/// The figures, with their names.
const COLUMNS: [(&str, Figure); 4] = [
    ("gigabytes_per_second", |f| f.gigabytes_per_second),
    ("iops", |f| f.iops),
    ("latency_us_p99", |f| f.latency_us_p99),
    ("cpu_seconds_per_gigabyte", |f| f.cpu_seconds_per_gigabyte),
];

struct Bench<'a> {
    options: &'a Compare,
    settings: Settings,
    fio: PathBuf,
    ours: Vec<DataFile>,
    theirs: Vec<DataFile>,
    meter: Meter,
    is_direct: bool,
}

/// Compares and reports. Gives the exit code.
pub fn run(options: &Compare, interrupt: Interrupt) -> Result<u8, Failure> {
    report::check_output(&options.output)?;
    let settings = options.engine.settings(&options.load, options.place.dirs.len())?;
    if !matches!(settings.engine, EngineChoice::Auto | EngineChoice::Uring) {
        return Err(Failure::usage("compare measures io_uring on both sides: use --engine auto or uring"));
    }
    options.engine.check_for(Engine::Uring)?;
    options.shape.check()?;
    let settings = Settings { engine: EngineChoice::Uring, ..settings };
    let mut plan = options.place.files(settings.block_bytes, options.shape.blocks_min(), 2)?;
    memory::check_settings(&settings, &plan)?;
    let fio = match fio::find() {
        Ok(fio) => fio,
        Err(failure) => {
            if options.output.json {
                report::print(&format!("{:#}\n", json!({ "skipped": failure.to_string() })))?;
            }
            return Err(failure);
        }
    };
    let ours = plan.open()?;
    (plan.keep, plan.reuse, plan.copies) = (false, false, 1);
    let theirs = plan.open()?;
    let mut bench =
        Bench { options, settings, fio, ours, theirs, meter: Meter::new(interrupt), is_direct: true };
    let mut comparison = Comparison::default();
    let outcome = bench.compare(&mut comparison);
    let finished = outcome.and_then(|()| run::finish(&mut bench.ours, &bench.settings, &mut bench.meter));
    bench.meter.clear();
    comparison.interrupted = bench.meter.interrupt.requested();
    report::publish(&options.output, &comparison)?;
    finished.map(|()| if bench.meter.interrupt.requested() { 130 } else { 0 })
}

impl Bench<'_> {
    fn compare(&mut self, comparison: &mut Comparison) -> Result<(), Failure> {
        self.meter.start_pass("writing the files");
        let buffered = !self.settings.direct;
        measure::stamp(&mut self.ours, buffered, &mut self.meter)?;
        measure::stamp(&mut self.theirs, buffered, &mut self.meter)?;
        let session = Session::open(&self.settings, &self.ours)?;
        self.is_direct = self.settings.direct && session.refusals(&self.ours).next().is_none();
        comparison.notes = run::notes(&session, &self.ours);
        drop(session);
        comparison.settings = self.describe();
        for direction in self.options.shape.directions() {
            comparison.notes.extend(note_on_mix(direction));
            comparison.directions.push(Pairs { direction, pairs: Vec::new() });
            for pair in 0..self.options.pairs {
                let Some(figures) = self.pair(direction, pair, comparison)? else { return Ok(()) };
                if let Some(last) = comparison.directions.last_mut() {
                    last.pairs.push(figures);
                }
            }
        }
        Ok(())
    }

    /// One run of each; every other time fio goes first. `None` when the user stopped it.
    fn pair(
        &mut self,
        direction: Direction,
        pair: u32,
        comparison: &mut Comparison,
    ) -> Result<Option<[Figures; 2]>, Failure> {
        let ours_first = pair.is_multiple_of(2);
        let before = if ours_first { Some(self.measure(direction)?) } else { None };
        if self.meter.interrupt.requested() {
            return Ok(None);
        }
        let Some(theirs) = self.run_fio(direction)? else { return Ok(None) };
        let ours = match before {
            Some(ours) => ours,
            None => self.measure(direction)?,
        };
        if self.settings.register && !ours.is_registered {
            let note = "the engine could not register memory (see --json of a plain run); fio did";
            if !comparison.notes.iter().any(|known| known == note) {
                comparison.notes.push(note.to_owned());
            }
        }
        Ok((!ours.tally.interrupted).then(|| [figures_of(&ours), theirs]))
    }

    fn measure(&mut self, direction: Direction) -> Result<Measured, Failure> {
        let (seconds, warm_up) = self.options.load.times(5.0);
        let (random, seed) = (self.options.shape.random, self.options.place.seed);
        self.meter.start(&format!("{} aio-bench", direction.name()), seconds);
        let workload = Workload { direction, random, seed, validate: false, loops: None };
        let session = Session::open(&self.settings, &self.ours)?;
        session.measure(&mut self.ours, workload, Timing::of(warm_up, seconds), &mut self.meter)
    }

    fn run_fio(&mut self, direction: Direction) -> Result<Option<Figures>, Failure> {
        let (seconds, warm_up) = self.options.load.times(5.0);
        self.meter.start(&format!("{} fio", direction.name()), seconds);
        let blocks = self.ours.iter().map(|file| file.data_bytes / self.settings.block_bytes).min();
        let job = Job {
            settings: &self.settings,
            depth: self.settings.queue_depth.min(blocks.unwrap_or(1) as usize),
            direction,
            random: self.options.shape.random,
            seconds,
            warm_up,
            is_direct: self.is_direct,
        };
        fio::run(&self.fio, &job.arguments(&self.theirs), &self.meter.interrupt)
    }

    fn describe(&self) -> Value {
        let (seconds, warm_up) = self.options.load.times(5.0);
        json!({
            "dirs": report::shown(&self.options.place.dirs),
            "file_bytes": self.ours.first().map(|file| file.data_bytes),
            "block_bytes": self.settings.block_bytes,
            "queue_depth": self.settings.queue_depth,
            "rings": self.settings.rings,
            "registered": self.settings.register,
            "direct": self.is_direct,
            "random": self.options.shape.random,
            "seconds": seconds,
            "warm_up_seconds": warm_up,
        })
    }
}

fn note_on_mix(direction: Direction) -> Option<String> {
    let mix = direction.mix()?;
    let percent = fio::share_of_reading(mix);
    Some(format!(
        "mixed: ours reads the file's first half and writes its second in the exact ratio {mix}; fio draws {percent} % \
         reads over its whole file"
    ))
}

fn figures_of(measured: &Measured) -> Figures {
    let p99 = |side: &Side| side.latency.quantile(0.99) as f64 / 1e3;
    Figures {
        gigabytes_per_second: measured.gigabytes_per_second(),
        iops: measured.iops(),
        latency_us_p99: p99(&measured.tally.read).max(p99(&measured.tally.write)),
        cpu_seconds_per_gigabyte: measured.cpu_seconds_per_gigabyte(),
    }
}

/// The middle one, or the mean of the middle two; 0 of none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        len if len.is_multiple_of(2) => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

impl Pairs {
    /// Median of ours and of fio's.
    pub fn medians(&self, figure: Figure) -> [f64; 2] {
        [0, 1].map(|who| median(self.pairs.iter().map(|pair| figure(&pair[who])).collect()))
    }

    fn rows(&self) -> Vec<Vec<String>> {
        let title = self.title();
        let cells = |of: &Figures| {
            let cpu = format!("{:.4}", of.cpu_seconds_per_gigabyte);
            let p99 = format!("{:.0}", of.latency_us_p99);
            [format!("{:.3}", of.gigabytes_per_second), format!("{:.0}", of.iops), p99, cpu]
        };
        let row = |name: String, cells: [String; 4]| std::iter::once(name).chain(cells).collect::<Vec<_>>();
        let mut rows = Vec::new();
        for (index, [ours, theirs]) in self.pairs.iter().enumerate() {
            rows.push(row(format!("{title} {} aio-bench", index + 1), cells(ours)));
            rows.push(row(format!("{title} {} fio", index + 1), cells(theirs)));
        }
        let medians = COLUMNS.map(|(_, figure)| self.medians(figure));
        let of = |who: usize| Figures {
            gigabytes_per_second: medians[0][who],
            iops: medians[1][who],
            latency_us_p99: medians[2][who],
            cpu_seconds_per_gigabyte: medians[3][who],
        };
        rows.push(row(format!("{title} median aio-bench"), cells(&of(0))));
        rows.push(row(format!("{title} median fio"), cells(&of(1))));
        rows.push(row(
            format!("{title} ratio"),
            medians.map(|m| ratio(m).map_or("-".into(), |r| format!("{r:.3}"))),
        ));
        rows
    }

    fn title(&self) -> String {
        self.direction.mix().map_or_else(|| self.direction.name().to_owned(), |mix| format!("mixed {mix}"))
    }

    fn json(&self) -> Value {
        let object = |of: &Figures| {
            COLUMNS
                .iter()
                .map(|(name, figure)| ((*name).to_owned(), json!(figure(of))))
                .collect::<serde_json::Map<_, _>>()
        };
        let pair = |pair: &[Figures; 2]| json!({ "aio_bench": object(&pair[0]), "fio": object(&pair[1]) });
        let medians = |who: usize| {
            let median =
                |(name, figure): &(&str, Figure)| ((*name).to_owned(), json!(self.medians(*figure)[who]));
            COLUMNS.iter().map(median).collect::<serde_json::Map<_, _>>()
        };
        let ratios =
            COLUMNS.iter().map(|(name, figure)| ((*name).to_owned(), json!(ratio(self.medians(*figure)))));
        json!({
            "direction": self.direction.name(),
            "mix": self.direction.mix().map(|mix| mix.to_string()),
            "pairs": self.pairs.iter().map(pair).collect::<Vec<_>>(),
            "median": { "aio_bench": medians(0), "fio": medians(1) },
            "ratio": ratios.collect::<serde_json::Map<_, _>>(),
        })
    }
}

/// Ours as a multiple of fio's.
fn ratio([ours, theirs]: [f64; 2]) -> Option<f64> {
    (theirs > 0.0).then(|| ours / theirs)
}

impl Findings for Comparison {
    fn text(&self) -> String {
        let mut rows = vec![["", "GB/s", "IOPS", "p99 us", "CPU s/GB"].map(str::to_owned).to_vec()];
        rows.extend(self.measured().flat_map(Pairs::rows));
        let mut text = report::table(&rows);
        if self.interrupted {
            text += "interrupted: these are the pairs that were complete\n";
        }
        text += "ratio: aio-bench / fio of the medians; above 1 is better for GB/s and IOPS, below 1 for p99 and CPU\n";
        self.notes.iter().for_each(|note| text += &format!("note: {note}\n"));
        text
    }

    fn json(&self) -> Value {
        json!({
            "settings": self.settings,
            "directions": self.measured().map(Pairs::json).collect::<Vec<_>>(),
            "interrupted": self.interrupted,
            "notes": self.notes,
        })
    }

    fn csv(&self) -> String {
        let mut text =
            "direction,pair,program,gigabytes_per_second,iops,latency_us_p99,cpu_seconds_per_gigabyte\n"
                .to_owned();
        for pairs in &self.directions {
            for (index, pair) in pairs.pairs.iter().enumerate() {
                for (program, of) in ["aio-bench", "fio"].iter().zip(pair) {
                    let cells = COLUMNS.map(|(_, figure)| format!("{:.6}", figure(of)));
                    text += &format!("{},{},{program},{}\n", pairs.title(), index + 1, cells.join(","));
                }
            }
        }
        text
    }

    fn html(&self) -> String {
        html::table_page("aio-bench beside fio", &self.text(), &self.bars())
    }
}

impl Comparison {
    /// The directions with at least one pair.
    fn measured(&self) -> impl Iterator<Item = &Pairs> {
        self.directions.iter().filter(|pairs| !pairs.pairs.is_empty())
    }

    /// Every direction's median rates, for a chart.
    fn bars(&self) -> Vec<(String, f64)> {
        let bars = |pairs: &Pairs| {
            let [ours, theirs] = pairs.medians(|figures| figures.gigabytes_per_second);
            [(format!("{} aio-bench", pairs.title()), ours), (format!("{} fio", pairs.title()), theirs)]
        };
        self.measured().flat_map(bars).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(Vec::new()), 0.0);
        assert_eq!(ratio([1.0, 2.0]), Some(0.5));
        assert_eq!(ratio([1.0, 0.0]), None);
    }
}
