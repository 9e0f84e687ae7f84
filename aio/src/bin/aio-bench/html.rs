//! A page with charts that needs nothing else: inline SVG, no script, light and dark by the reader's setting.

use crate::measure::Measured;
use crate::report::{Findings, QUANTILES, Report};
use crate::sweep::Points;
use crate::units;
use std::fmt::Write as _;

const STYLE: &str = "
:root { --back: #ffffff; --text: #1d2430; --soft: #68717f; --grid: #dde1e7; --a: #2463c9; --b: #c2571a; }
@media (prefers-color-scheme: dark) {
  :root { --back: #14181f; --text: #e4e8ee; --soft: #98a2b1; --grid: #2f3743; --a: #6ea4ff; --b: #f0945a; }
}
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; font-size: 13px; }
svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font-size: 12px; font-family: inherit; }
.grid { stroke: var(--grid); stroke-width: 1; }
.a { fill: none; stroke: var(--a); stroke-width: 2; } .b { fill: none; stroke: var(--b); stroke-width: 2; }
.fill-a { fill: var(--a); } .fill-b { fill: var(--b); }
svg text.on { fill: var(--text); }
";

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 70.0;
const BOTTOM: f64 = 30.0;
const TOP: f64 = 16.0;

/// The page of a run.
pub fn run_page(report: &Report) -> String {
    let mut body = pre(&report.text());
    for result in &report.results {
        let title = escape(&result.title());
        let _ = write!(body, "<h2>{title}: throughput over time</h2>{}", over_time(result));
        let _ = write!(body, "<h2>{title}: latency</h2>{}{}", percentiles(result), histogram(result));
    }
    page("aio-bench", &body)
}

/// The page of a sweep.
pub fn sweep_page(points: &Points) -> String {
    let mut body = pre(&points.text());
    for direction in points.directions() {
        let of_direction: Vec<&Measured> =
            points.all.iter().filter(|point| point.workload.direction == direction).collect();
        let _ = write!(
            body,
            "<h2>{}: GB/s by block size and depth</h2>{}",
            direction.name(),
            heat_map(&of_direction)
        );
    }
    page("aio-bench sweep", &body)
}

/// A page with a text and a chart of bars.
pub fn table_page(title: &str, text: &str, bars: &[(String, f64)]) -> String {
    let rows: Vec<(String, f64, String)> =
        bars.iter().map(|(name, rate)| (name.clone(), *rate, format!("{rate:.3} GB/s"))).collect();
    page(title, &format!("{}{}", pre(text), bar_chart(&rows)))
}

fn page(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\">\
         <meta name=\"color-scheme\" content=\"light dark\"><title>{title}</title><style>{STYLE}</style></head>\n\
         <body><h1>{title}</h1>{body}</body>\n</html>\n"
    )
}

fn pre(text: &str) -> String {
    format!("<pre>{}</pre>", escape(text))
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

fn svg(height: f64, content: &str) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">{content}</svg>")
}

fn label(x: f64, y: f64, anchor: &str, text: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escape(text))
}

/// Read and write rate per window.
fn over_time(result: &Measured) -> String {
    let window = result.tally.window.as_secs_f64();
    let full = result.windows().len().min(result.tally.series.len());
    let rates = |kind: usize| -> Vec<f64> {
        result.tally.series[..full].iter().map(|w| w[kind] as f64 / 1e9 / window).collect()
    };
    let (read, write) = (rates(0), rates(1));
    let max = read.iter().chain(&write).copied().fold(0.0, f64::max);
    if full < 2 || max <= 0.0 {
        return "<p>too short for a chart</p>".to_owned();
    }
    let mut content = rate_axis(max);
    let floor = HEIGHT - BOTTOM;
    let _ = write!(content, "{}", label(LEFT, HEIGHT - 8.0, "start", "0 s"));
    let end = format!("{:.1} s", full as f64 * window);
    let _ = write!(content, "{}", label(WIDTH - 8.0, HEIGHT - 8.0, "end", &end));
    for (class, rates, name, at) in [("a", &read, "read", 0.0), ("b", &write, "write", 60.0)] {
        if rates.iter().all(|rate| *rate == 0.0) {
            continue;
        }
        let x = |index: usize| LEFT + (WIDTH - LEFT - 8.0) * index as f64 / (full - 1) as f64;
        let y = |rate: f64| floor - (floor - TOP) * rate / (max * 1.05);
        let line: Vec<String> = rates
            .iter()
            .enumerate()
            .map(|(index, rate)| format!("{:.1},{:.1}", x(index), y(*rate)))
            .collect();
        let _ = write!(content, "<polyline class=\"{class}\" points=\"{}\"/>", line.join(" "));
        let (x, middle) = (WIDTH / 2.0 + at, HEIGHT - 12.0);
        let _ = write!(
            content,
            "<rect class=\"fill-{class}\" x=\"{:.1}\" y=\"{:.1}\" width=\"10\" height=\"4\"/>",
            x - 14.0,
            middle
        );
        content += &label(x, HEIGHT - 8.0, "start", name);
    }
    svg(HEIGHT, &content)
}

fn rate_axis(max: f64) -> String {
    let floor = HEIGHT - BOTTOM;
    let mut content = String::new();
    for step in 0..=4 {
        let rate = max * 1.05 * f64::from(step) / 4.0;
        let y = floor - (floor - TOP) * f64::from(step) / 4.0;
        let end = WIDTH - 8.0;
        let _ =
            write!(content, "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{y:.1}\" x2=\"{end}\" y2=\"{y:.1}\"/>");
        content += &label(LEFT - 6.0, y + 4.0, "end", &format!("{rate:.2} GB/s"));
    }
    content
}

fn percentiles(result: &Measured) -> String {
    let latency = result.latency();
    let mut rows: Vec<(String, f64, String)> = QUANTILES
        .iter()
        .map(|(name, share)| (*name, latency.quantile(*share)))
        .chain([("max", latency.max())])
        .map(|(name, ns)| (name.to_owned(), ns as f64, units::latency(ns)))
        .collect();
    rows.retain(|row| row.1 > 0.0);
    bar_chart(&rows)
}

fn histogram(result: &Measured) -> String {
    let latency = result.latency();
    let share = |count: u64| 100.0 * count as f64 / latency.count().max(1) as f64;
    let row = |(start, count): (u64, u64)| {
        (format!("from {}", units::latency(start)), count as f64, format!("{:.2} %", share(count)))
    };
    bar_chart(&latency.bars().into_iter().map(row).collect::<Vec<_>>())
}

/// Horizontal bars: a name, a length, and what is written beside it.
fn bar_chart(rows: &[(String, f64, String)]) -> String {
    let max = rows.iter().map(|row| row.1).fold(0.0, f64::max);
    let (line, left) = (22.0, 160.0);
    let mut content = String::new();
    for (index, (name, value, text)) in rows.iter().enumerate() {
        let y = TOP + index as f64 * line;
        let width = if max > 0.0 { (WIDTH - left - 110.0) * value / max } else { 0.0 };
        content += &label(left - 8.0, y + 13.0, "end", name);
        let _ = write!(
            content,
            "<rect class=\"fill-a\" x=\"{left}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"16\"/>"
        );
        content += &label(left + width + 6.0, y + 13.0, "start", text);
    }
    svg(TOP * 2.0 + rows.len() as f64 * line, &content)
}

/// The best rate of each block size and depth, whatever the engine and its rings.
fn heat_map(points: &[&Measured]) -> String {
    let sorted = |mut values: Vec<u64>| {
        values.sort_unstable();
        values.dedup();
        values
    };
    let blocks = sorted(points.iter().map(|point| point.settings.block_bytes).collect());
    let depths = sorted(points.iter().map(|point| point.settings.queue_depth as u64).collect());
    let rate = |block: u64, depth: u64| {
        let at = points
            .iter()
            .filter(|p| p.settings.block_bytes == block && p.settings.queue_depth as u64 == depth);
        at.map(|point| point.gigabytes_per_second())
            .fold(None, |best: Option<f64>, r| Some(best.map_or(r, |b| b.max(r))))
    };
    let max = points.iter().map(|point| point.gigabytes_per_second()).fold(0.0, f64::max);
    let (cell, left) = (34.0, 90.0);
    let width = (WIDTH - left) / depths.len().max(1) as f64;
    let mut content = String::new();
    for (row, block) in blocks.iter().enumerate() {
        let y = TOP + row as f64 * cell;
        content += &label(left - 8.0, y + 21.0, "end", &units::size(*block));
        for (column, depth) in depths.iter().enumerate() {
            let Some(rate) = rate(*block, *depth) else { continue };
            let (x, strength) = (left + column as f64 * width, if max > 0.0 { rate / max } else { 0.0 });
            let _ = write!(
                content,
                "<rect class=\"fill-a\" opacity=\"{:.2}\" x=\"{x:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{:.1}\"/>\
                 <text class=\"on\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{rate:.2}</text>",
                0.08 + 0.62 * strength,
                width - 3.0,
                cell - 3.0,
                x + width / 2.0,
                y + 20.0
            );
        }
    }
    let floor = TOP + blocks.len() as f64 * cell + 14.0;
    for (column, depth) in depths.iter().enumerate() {
        content += &label(left + (column as f64 + 0.5) * width, floor, "middle", &format!("depth {depth}"));
    }
    svg(floor + 10.0, &content)
}
