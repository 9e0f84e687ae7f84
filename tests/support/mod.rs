//! What the tests of the binary share: tiny model folders, data, and a runner that looks at how the process ends.
#![allow(dead_code, reason = "each test uses its part")]

#[path = "../../aio/tests/support/seccomp.rs"]
mod seccomp;

use seccomp::{instruction, limit, obey};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use terrace_kernels::DType;
use terrace_models::{Model, ModelConfig, RandomSource, export_folder};
use terrace_zero::{ParamSpec, WeightReader, WeightSource};

/// Nothing here takes this long; a run that does hangs.
const RUN_SECONDS_MAX: u64 = 120;

/// The measures of a model.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub positions: usize,
    pub seed: u64,
    /// Most bytes of one safetensors file.
    pub shard_bytes: u64,
}

impl Shape {
    /// Some 60k parameters.
    pub const TINY: Self = Self {
        vocab: 96,
        hidden: 48,
        intermediate: 112,
        layers: 2,
        positions: 64,
        seed: 1,
        shard_bytes: u64::MAX,
    };

    pub fn config(&self) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": self.positions,
            // Wide, so that greedy choices are not near ties.
            "initializer_range": 0.1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": true,
            "torch_dtype": "bfloat16"
        })
    }

    /// Writes a model folder with random bf16 weights.
    pub fn write(&self, folder: &Path) {
        let config = self.config().to_string();
        let model = Model::new(ModelConfig::parse(&config).expect("a valid configuration"));
        let params: Vec<_> = model.blocks.iter().flat_map(|b| b.params().iter().cloned()).collect();
        let source = RandomSource::for_config(&model.config, self.seed);
        let mut reader = Drawn { source, params };
        export_folder(&mut reader, None, folder, self.shard_bytes, &config).expect("the folder is written");
    }

    pub fn parameters(&self) -> u64 {
        let config = ModelConfig::parse(&self.config().to_string()).expect("a valid configuration");
        terrace_models::param_count(&config)
    }
}

/// Random weights where the exporter expects an engine's.
struct Drawn {
    source: RandomSource,
    params: Vec<ParamSpec>,
}

impl WeightReader for Drawn {
    fn dtype(&self) -> DType {
        DType::BF16
    }

    fn params(&self) -> Vec<ParamSpec> {
        self.params.clone()
    }

    fn read(&mut self, param: &ParamSpec, start: usize, out: &mut [u8]) -> terrace_zero::Result {
        let mut values = vec![0.0; out.len() / 2];
        self.source.read(param, start, &mut values)?;
        for (out, value) in out.chunks_exact_mut(2).zip(values) {
            out.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
        }
        Ok(())
    }
}

/// Pre-tokenized rows of `len` ids below `vocab`.
pub fn write_rows(path: &Path, rows: usize, len: usize, vocab: usize, seed: u64) {
    let mut random = Random::new(seed);
    let mut file = fs::File::create(path).unwrap();
    for _ in 0..rows {
        let ids: Vec<u64> = (0..len).map(|_| random.below(vocab as u64)).collect();
        writeln!(file, "{}", json!({ "input_ids": ids })).unwrap();
    }
}

/// A model, data and a place for everything a run makes; removed when dropped.
pub struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    pub fn empty() -> Self {
        // Beside the build, not in /tmp, which may be a memory file system without direct I/O.
        Self { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    /// A tiny model in `model` and 40 rows in `data.jsonl`.
    pub fn tiny() -> Self {
        Self::with(&Shape::TINY)
    }

    pub fn with(shape: &Shape) -> Self {
        let bench = Self::empty();
        shape.write(&bench.path("model"));
        write_rows(&bench.path("data.jsonl"), 40, 24, shape.vocab, 5);
        bench
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// `terrace finetune` on the model and the data, into `output`. Two threads, so that a machine's size changes nothing.
    pub fn finetune(&self, output: &str) -> Cmd {
        cmd(&["finetune", "--threads", "2"])
            .path("--model", &self.path("model"))
            .path("--data", &self.path("data.jsonl"))
            .path("--output", &self.path(output))
            .args(&["--seq-len", "24", "--batch-size", "2", "--learning-rate", "1e-3"])
    }

    pub fn generate(&self, model: &str) -> Cmd {
        cmd(&["generate", "--threads", "2", "--json"]).path("--model", &self.path(model))
    }

    /// The bytes of an exported model's one weight file.
    pub fn weights(&self, output: &str) -> Vec<u8> {
        let path = self.path(output).join("model.safetensors");
        fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    pub fn metrics(&self, output: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(output).join("metrics.jsonl")).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}")))
            .collect()
    }

    /// The bars of a `--trace` of Chrome's format, with the names of their lanes for `tid`.
    pub fn bars(&self, trace: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path(trace)).unwrap();
        let written: Vec<Value> = serde_json::from_str(&text).unwrap();
        let lane = |number: &Value| {
            let named = |e: &&Value| e["name"] == "thread_name" && e["tid"] == *number;
            written.iter().find(named).unwrap_or_else(|| panic!("lane {number} has a name"))["args"]["name"]
                .clone()
        };
        let bars = written.iter().filter(|e| e["ph"] == "X");
        bars.map(|bar| {
            let mut bar = bar.clone();
            bar["tid"] = lane(&bar["tid"]);
            bar
        })
        .collect()
    }

    /// The steps in `metrics.jsonl`, in order.
    pub fn steps(&self, output: &str) -> Vec<u64> {
        self.metrics(output).iter().map(|m| m["step"].as_u64().unwrap()).collect()
    }

    /// The time of the last step in `metrics.jsonl`, if there is one.
    pub fn last_step_seconds(&self, output: &str) -> Option<f64> {
        let text = fs::read_to_string(self.path(output).join("metrics.jsonl")).ok()?;
        let line: Value = serde_json::from_str(text.rsplit('\n').nth(1)?).ok()?;
        line["step_seconds"].as_f64()
    }

    /// Whole lines in `metrics.jsonl`, which may not exist yet.
    pub fn steps_so_far(&self, output: &str) -> usize {
        let bytes = fs::read(self.path(output).join("metrics.jsonl")).unwrap_or_default();
        bytes.iter().filter(|&&b| b == b'\n').count()
    }
}

/// Bars of a lane follow one another, within what numbers of microseconds round off.
pub fn no_bar_covers_another(bars: &[Value]) {
    let mut busy_until = HashMap::new();
    let mut sorted: Vec<&Value> = bars.iter().collect();
    let start = |bar: &Value| bar["ts"].as_f64().unwrap();
    sorted.sort_by(|a, b| start(a).total_cmp(&start(b)));
    for bar in sorted {
        let end = busy_until.entry(bar["tid"].as_str().unwrap()).or_insert(0.0);
        assert!(start(bar) >= *end - 1e-3, "{bar} begins before {end}");
        *end = start(bar) + bar["dur"].as_f64().unwrap();
    }
}

/// A command line of the binary.
#[derive(Clone)]
pub struct Cmd {
    args: Vec<OsString>,
    environment: Vec<(&'static str, String)>,
    input: Option<PathBuf>,
    limits: Vec<(libc::__rlimit_resource_t, u64)>,
    is_alone: bool,
}

pub fn cmd(args: &[&str]) -> Cmd {
    let (environment, limits) = (Vec::new(), Vec::new());
    Cmd { args: Vec::new(), environment, input: None, limits, is_alone: false }.args(args)
}

impl Cmd {
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(OsString::from));
        self
    }

    #[must_use]
    pub fn path(mut self, flag: &str, path: &Path) -> Self {
        self.args.push(flag.into());
        self.args.push(path.into());
        self
    }

    /// The words after the command's name.
    pub fn words(&self) -> &[OsString] {
        &self.args
    }

    /// Takes a flag and its value out again.
    #[must_use]
    pub fn without(mut self, flag: &str) -> Self {
        let at = self.args.iter().position(|word| word == flag).expect("the flag is there");
        self.args.drain(at..at + 2);
        self
    }

    /// Sets a variable of the environment.
    #[must_use]
    pub fn environment(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.to_owned()));
        self
    }

    /// Gives it a file as its standard input, which is empty otherwise.
    #[must_use]
    pub fn input(mut self, path: &Path) -> Self {
        self.input = Some(path.into());
        self
    }

    /// Lets the process have no more of a resource.
    #[must_use]
    pub fn limit(mut self, resource: libc::__rlimit_resource_t, most: u64) -> Self {
        self.limits.push((resource, most));
        self
    }

    /// Lets the process start no threads, as where there are as many as there may be.
    #[must_use]
    pub fn alone(self) -> Self {
        Self { is_alone: true, ..self }
    }

    pub fn spawn(&self) -> Running {
        let mut command = Command::new(env!("CARGO_BIN_EXE_terrace"));
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let (limits, filter) = (self.limits.clone(), self.is_alone.then(refuse_threads));
        // SAFETY: between fork and exec it only makes system calls.
        unsafe { command.pre_exec(move || restrict(&limits, filter.as_ref())) };
        let open = |path| Stdio::from(fs::File::open(path).expect("the input is there"));
        let input = self.input.as_ref().map_or_else(Stdio::null, open);
        command.args(&self.args).stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
        Running { child: command.spawn().expect("the binary starts"), began: Instant::now() }
    }

    pub fn run(&self) -> Ended {
        self.spawn().wait()
    }

    /// Runs, for so many seconds at most.
    pub fn ends_within(&self, seconds: u64) -> Ended {
        let running = self.spawn();
        if running.wait_until(|| running.began.elapsed().as_secs() >= seconds) {
            running.signal(libc::SIGKILL);
        }
        let ended = running.wait();
        assert_ne!(ended.signal(), Some(libc::SIGKILL), "{:?} hangs\n{}", self.args, ended.stderr);
        ended
    }

    /// Runs and expects success.
    pub fn ok(&self) -> Ended {
        let ended = self.run();
        assert_eq!(ended.code(), Some(0), "{:?}\n{}", self.args, ended.stderr);
        ended
    }

    /// Runs and expects this exit code, a one-document-free stdout and all of `parts` on stderr.
    pub fn fails(&self, code: i32, parts: &[&str]) -> Ended {
        let ended = self.run();
        assert_eq!(ended.code(), Some(code), "{:?}\n{}", self.args, ended.stderr);
        assert!(ended.stdout.is_empty(), "{:?} prints {}", self.args, ended.stdout);
        for part in parts {
            assert!(ended.stderr.contains(part), "{part:?} is in:\n{}", ended.stderr);
        }
        assert!(ended.stderr.contains("error: "), "{}", ended.stderr);
        ended
    }
}

/// A seccomp filter under which no thread starts.
fn refuse_threads() -> [libc::sock_filter; 5] {
    let refusal = libc::SECCOMP_RET_ERRNO | libc::EAGAIN as u32;
    [
        // The number of the system call is the first word of what a filter sees.
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 2, 0, libc::SYS_clone as u32),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, libc::SYS_clone3 as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, refusal),
    ]
}

/// Takes away what the process may not have. Only system calls: it runs between fork and exec.
fn restrict(
    limits: &[(libc::__rlimit_resource_t, u64)],
    filter: Option<&[libc::sock_filter; 5]>,
) -> std::io::Result<()> {
    limits.iter().try_for_each(|(resource, most)| limit(*resource, *most))?;
    filter.map_or(Ok(()), |filter| obey(filter))
}

/// A process under way. What it prints is little and fits the pipes.
pub struct Running {
    child: Child,
    began: Instant,
}

impl Running {
    pub fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.child.id()).unwrap();
        // SAFETY: kill only sends a signal; the process is a child that has not been waited for, so the id is its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    pub fn is_running(&self) -> bool {
        // SAFETY: an all-zero siginfo_t is a valid value of that plain C struct.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: `info` is valid for writing. WNOWAIT leaves the child to be reaped by `wait`.
        let result = unsafe { libc::waitid(libc::P_PID, self.child.id(), &raw mut info, options) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
        // SAFETY: waitid filled this variant or left it zero, which means that nothing has ended.
        unsafe { info.si_pid() == 0 }
    }

    /// Waits until `done` says so; gives false if the process ended before.
    pub fn wait_until(&self, mut done: impl FnMut() -> bool) -> bool {
        while !done() {
            if !self.is_running() {
                return done();
            }
            self.check_time();
            std::thread::sleep(Duration::from_micros(300));
        }
        true
    }

    pub fn wait(mut self) -> Ended {
        use std::io::Read;
        let (mut stdout, mut stderr) = (String::new(), String::new());
        let mut errors = self.child.stderr.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            errors.read_to_end(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        self.child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
        stderr += &reader.join().unwrap();
        let (status, peak_bytes) = wait4(self.child.id());
        self.check_time();
        assert!(!stderr.contains("panicked at"), "the binary panicked:\n{stderr}");
        Ended { status, stdout, stderr, peak_bytes, seconds: self.began.elapsed().as_secs_f64() }
    }

    fn check_time(&self) {
        assert!(self.began.elapsed().as_secs() < RUN_SECONDS_MAX, "the run hangs");
    }
}

/// Reaps a child; gives its status and its largest resident set.
///
/// The kernel carries a process's high-water mark over from before its exec, so the figure is never below what this test
/// process had resident when it started the child: tests that look at it must stay small themselves.
fn wait4(pid: u32) -> (ExitStatus, u64) {
    let mut status = 0;
    // SAFETY: an all-zero rusage is a valid value of that plain C struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    let pid = i32::try_from(pid).unwrap();
    // SAFETY: both pointers are valid for writing; the child is ours and has not been reaped.
    let reaped = unsafe { libc::wait4(pid, &raw mut status, 0, &raw mut usage) };
    assert_eq!(reaped, pid, "{}", std::io::Error::last_os_error());
    (ExitStatus::from_raw(status), u64::try_from(usage.ru_maxrss).unwrap() << 10)
}

/// How a process ended.
pub struct Ended {
    status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
    /// Largest resident set.
    pub peak_bytes: u64,
    pub seconds: f64,
}

impl Ended {
    /// The exit code; `None` if a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e} in:\n{}", self.stdout))
    }
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// The seed of a test: from `TERRACE_TEST_SEED`, else a fixed one.
pub fn seed() -> u64 {
    let seed = std::env::var("TERRACE_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(20_260_418);
    println!("TERRACE_TEST_SEED={seed}");
    seed
}

/// A small file system in memory, unmounted when dropped; `None` where this process may not mount.
pub struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    pub fn mount(bytes: u64) -> Option<Self> {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let mounted = mount(&["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"], dir.path());
        if !mounted {
            println!("skipped: this process may not mount file systems");
            return None;
        }
        Some(Self { dir })
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn resize(&self, bytes: u64) {
        assert!(mount(&["-o", &format!("remount,size={bytes}")], self.path()));
    }

    pub fn make_read_only(&self) {
        assert!(mount(&["-o", "remount,ro"], self.path()));
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // What stays mounted is in memory and under the build folder; the test's verdict does not depend on it.
        let _ = Command::new("umount").arg(self.dir.path()).status();
    }
}

fn mount(options: &[&str], at: &Path) -> bool {
    let status = Command::new("mount").args(options).arg(at).stderr(Stdio::null()).status();
    status.is_ok_and(|s| s.success())
}

/// Every file below `dir` with its length, sorted.
pub fn files(dir: &Path) -> Vec<(PathBuf, u64)> {
    let mut all = Vec::new();
    let mut folders = vec![dir.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let metadata = entry.metadata().unwrap();
            if metadata.is_dir() {
                folders.push(entry.path());
            } else {
                all.push((entry.path(), metadata.len()));
            }
        }
    }
    all.sort();
    all
}
