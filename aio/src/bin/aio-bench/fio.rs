//! fio with the settings of a measurement, and its figures.

use crate::failure::Failure;
use crate::files::DataFile;
use crate::interrupt::Interrupt;
use crate::measure::Settings;
use serde_json::Value;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use terrace_aio::bench::mix::Direction;

/// How long fio may take to end its jobs.
const PATIENCE: Duration = Duration::from_secs(5);

/// What both programs report.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    pub gigabytes_per_second: f64,
    pub iops: f64,
    /// The larger of reading's and writing's.
    pub latency_us_p99: f64,
    pub cpu_seconds_per_gigabyte: f64,
}

/// One run of fio.
#[derive(Debug)]
pub struct Job<'a> {
    pub settings: &'a Settings,
    pub depth: usize,
    pub direction: Direction,
    pub random: bool,
    pub seconds: f64,
    pub warm_up: f64,
    pub is_direct: bool,
}

/// Where fio is.
pub fn find() -> Result<PathBuf, Failure> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join("fio")).find(|fio| fio.is_file());
    found.ok_or_else(|| {
        let how = "install it (apt install fio, dnf install fio, pacman -S fio) and run this again";
        Failure::failed(format!("fio is not in PATH, so there is nothing to compare with: {how}"))
    })
}

impl Job<'_> {
    /// Its command line.
    pub fn arguments(&self, files: &[DataFile]) -> Vec<String> {
        let ms = |seconds: f64| (seconds * 1e3).round() as u64;
        let flag = |on: bool| u8::from(on);
        let mut arguments = vec![
            "--output-format=json".to_owned(),
            "--ioengine=io_uring".to_owned(),
            format!("--rw={}", self.pattern()),
            format!("--direct={}", flag(self.is_direct)),
            format!("--bs={}", self.settings.block_bytes),
            format!("--iodepth={}", self.depth),
            format!("--runtime={}ms", ms(self.seconds)),
            format!("--ramp_time={}ms", ms(self.warm_up)),
            "--time_based=1".to_owned(),
            "--norandommap=1".to_owned(),
            "--allow_file_create=0".to_owned(),
            "--lat_percentiles=1".to_owned(),
            format!("--end_fsync={}", flag(!self.is_direct && self.direction.writes())),
        ];
        if let Some(mix) = self.direction.mix() {
            arguments.push(format!("--rwmixread={}", share_of_reading(mix)));
        }
        if self.settings.register {
            arguments.extend(["--fixedbufs=1", "--registerfiles=1"].map(str::to_owned));
        }
        arguments.push("--nonvectored=1".to_owned());
        if self.settings.sq_poll {
            arguments.push("--sqthread_poll=1".to_owned());
        }
        if self.settings.io_poll {
            arguments.push("--hipri=1".to_owned());
        }
        for (index, file) in files.iter().enumerate() {
            let bytes = file.data_bytes;
            arguments.push(format!("--name=dir{index}"));
            arguments.push(format!("--filename=/proc/{}/fd/{}", std::process::id(), file.descriptor()));
            arguments.push(format!("--size={bytes}"));
        }
        arguments
    }

    fn pattern(&self) -> &'static str {
        match (self.direction, self.random) {
            (Direction::Read, false) => "read",
            (Direction::Write, false) => "write",
            (Direction::Mixed(_), false) => "rw",
            (Direction::Read, true) => "randread",
            (Direction::Write, true) => "randwrite",
            (Direction::Mixed(_), true) => "randrw",
        }
    }
}

/// Reading in percent, which is what fio takes.
pub fn share_of_reading(mix: terrace_aio::bench::mix::Mix) -> u64 {
    let (read, whole) = (u64::from(mix.read), u64::from(mix.read) + u64::from(mix.write));
    (100 * read + whole / 2) / whole
}

/// Runs fio to its end; `None` when the user stopped it.
pub fn run(fio: &PathBuf, arguments: &[String], interrupt: &Interrupt) -> Result<Option<Figures>, Failure> {
    let failed = |what: String| Failure::failed(format!("fio: {what}"));
    let mut command = Command::new(fio);
    // A group of its own: Ctrl-C comes to us, and we end it.
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    // SAFETY: between fork and exec only one system call is made, which touches no memory.
    unsafe {
        command.pre_exec(|| {
            // Should we be killed, fio is to end too.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
    let mut child = command.spawn().map_err(|e| Failure::io("starting", fio, &e))?;
    let output = reader(child.stdout.take());
    let errors = reader(child.stderr.take());
    let status = wait(&mut child, interrupt).map_err(|e| failed(e.to_string()))?;
    let (output, errors) = (output.join().unwrap_or_default(), errors.join().unwrap_or_default());
    if interrupt.requested() {
        return Ok(None);
    }
    if !status.success() {
        let why =
            errors.lines().chain(output.lines()).find(|line| !line.trim().is_empty()).unwrap_or("no message");
        return Err(failed(format!("{status}: {why}")));
    }
    parse(&output).map(Some).map_err(failed)
}

fn wait(child: &mut Child, interrupt: &Interrupt) -> std::io::Result<std::process::ExitStatus> {
    let mut asked: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if interrupt.requested() {
            let asked = asked.get_or_insert_with(|| {
                // Its jobs are processes of their own that only fio itself ends.
                // SAFETY: a system call on a child that is not waited for yet.
                unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGTERM) };
                Instant::now()
            });
            if asked.elapsed() > PATIENCE {
                child.kill()?;
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Collects a pipe, so that it never fills up.
fn reader(pipe: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // A pipe that breaks ends what can be read.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// The figures in fio's JSON, summed over its jobs.
pub fn parse(output: &str) -> Result<Figures, String> {
    // Warnings may stand before the document.
    let start = output.find("\n{").map_or(0, |at| at + 1);
    let document: Value =
        serde_json::from_str(&output[start..]).map_err(|e| format!("not the JSON of fio: {e}"))?;
    let jobs = document["jobs"].as_array().filter(|jobs| !jobs.is_empty()).ok_or("it reports no jobs")?;
    let (mut bytes, mut rate, mut iops, mut cpu, mut p99) = (0.0, 0.0, 0.0, 0.0, 0.0f64);
    for job in jobs {
        let number =
            |value: &Value, what: &str| value.as_f64().ok_or(format!("{what} is missing in its report"));
        let share = (number(&job["usr_cpu"], "usr_cpu")? + number(&job["sys_cpu"], "sys_cpu")?) / 100.0;
        cpu += share * number(&job["job_runtime"], "job_runtime")? / 1e3;
        for side in [&job["read"], &job["write"]] {
            bytes += number(&side["io_bytes"], "io_bytes")?;
            rate += number(&side["bw_bytes"], "bw_bytes")?;
            iops += number(&side["iops"], "iops")?;
            p99 = p99.max(side["lat_ns"]["percentile"]["99.000000"].as_f64().unwrap_or(0.0));
        }
    }
    Ok(Figures {
        gigabytes_per_second: rate / 1e9,
        iops,
        latency_us_p99: p99 / 1e3,
        cpu_seconds_per_gigabyte: if bytes > 0.0 { cpu / (bytes / 1e9) } else { 0.0 },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use terrace_aio::bench::mix::Mix;

    #[test]
    fn jobs_are_summed() {
        let side = |bytes: u64, p99: u64| {
            format!(
                r#"{{"io_bytes": {bytes}, "bw_bytes": {bytes}, "iops": 10.0,
                "lat_ns": {{"percentile": {{"99.000000": {p99}}}}}}}"#
            )
        };
        let job = format!(
            r#"{{"usr_cpu": 10.0, "sys_cpu": 15.0, "job_runtime": 2000, "read": {}, "write": {}}}"#,
            side(1_000_000_000, 5000),
            side(0, 7000)
        );
        let figures = parse(&format!("fio: a warning\n{{\"jobs\": [{job}, {job}]}}")).unwrap();
        assert_eq!(figures.gigabytes_per_second, 2.0);
        assert_eq!(figures.iops, 40.0);
        assert_eq!(figures.latency_us_p99, 7.0);
        assert!((figures.cpu_seconds_per_gigabyte - 0.5).abs() < 1e-12);
        assert!(parse("{}").is_err() && parse("x").is_err());
    }

    #[test]
    fn the_mix_in_percent() {
        assert_eq!(share_of_reading(Mix { read: 1, write: 1 }), 50);
        assert_eq!(share_of_reading(Mix { read: 10, write: 12 }), 45);
    }
}
