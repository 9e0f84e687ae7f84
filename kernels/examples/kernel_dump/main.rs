//! Runs every operation of a backend on random operands and writes operands and results to files, one a case, so that another
//! system can compute the same: `scripts/gpu/torch_check.py` does so with torch.
//!
//! A case is a safetensors file. `in.NAME` are operands before the operation, `out.NAME` what it left; memory of results held
//! not-a-number before, so that an element nobody writes is found. Metadata are `op`, `variant` (which of the backend's kernels),
//! `name` (shapes and dtypes) and the operation's parameters, all as text.
//!
//! `--output DIR` is where, `--device N` or `cpu` on what (card 0 without), `--sizes tiny` is for drivers that only play a card,
//! `--only PART,…` chooses parts. The CPU's kernels are there to try the script; updates of state, which on the CPU are another
//! crate's, are only run on a card.

mod attention;
mod case;
mod delta;
mod experts;
mod products;
mod rows;
mod update;

use case::Case;
use std::cell::Cell;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use terrace_device::cuda::{CudaDevice, Library};
use terrace_device::host::HostDevice;
use terrace_device::{Arena, Device, DeviceError, Stream, StreamKind};
use terrace_kernels::cuda::{CudaConfig, update_kernels, with_config};
use terrace_kernels::update::UpdateKernels;
use terrace_kernels::{DType, KernelSet, cpu};

type Part = (&'static str, fn(&Rig));

/// Parts in the order in which they run.
const PARTS: [Part; 6] = [
    ("products", products::run),
    ("attention", attention::run),
    ("rows", rows::run),
    ("experts", experts::run),
    ("delta", delta::run),
    ("update", update::run),
];

/// Dtypes of operands and of results that the engine uses together.
const MIXES: [(DType, DType); 4] = [
    (DType::F32, DType::F32),
    (DType::BF16, DType::F32),
    (DType::BF16, DType::BF16),
    (DType::F16, DType::F16),
];

/// The largest cases need a few dozen MiB.
const ARENA_BYTES: usize = 256 << 20;
const ARENA_BYTES_TINY: usize = 16 << 20;

struct Settings {
    output: PathBuf,
    /// None: the CPU.
    card: Option<u32>,
    tiny: bool,
    only: Vec<String>,
}

impl Settings {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut settings = Self { output: PathBuf::new(), card: Some(0), tiny: false, only: Vec::new() };
        while let Some(word) = words.next() {
            let value = words.next().ok_or(format!("`{word}` needs a value"))?;
            match (word.as_str(), value.as_str()) {
                ("--output", folder) => settings.output = PathBuf::from(folder),
                ("--device", "cpu") => settings.card = None,
                ("--device", number) => {
                    settings.card = Some(number.parse().map_err(|_| format!("`{number}` is no device"))?);
                }
                ("--sizes", "full" | "tiny") => settings.tiny = value == "tiny",
                ("--only", parts) => settings.only.extend(parts.split(',').map(str::to_owned)),
                _ => return Err(format!("unknown argument `{word} {value}`")),
            }
        }
        if settings.output.as_os_str().is_empty() {
            return Err("`--output DIR` is missing".to_owned());
        }
        match settings.only.iter().find(|name| PARTS.iter().all(|(part, _)| part != name)) {
            Some(name) => Err(format!("there is no part `{name}`")),
            None => Ok(settings),
        }
    }
}

fn main() -> ExitCode {
    let settings = match Settings::parse(std::env::args().skip(1)) {
        Ok(settings) => settings,
        Err(message) => {
            eprintln!("{message}");
            return ExitCode::from(2);
        }
    };
    if let Err(error) = std::fs::create_dir_all(&settings.output) {
        eprintln!("cannot make {}: {error}", settings.output.display());
        return ExitCode::FAILURE;
    }
    let only = settings.only.clone();
    match Rig::new(settings) {
        Ok(rig) => {
            let chosen = |part: &str| only.is_empty() || only.iter().any(|name| name == part);
            PARTS.iter().filter(|(part, _)| chosen(part)).for_each(|(_, run)| run(&rig));
            eprintln!("{} cases in {}", rig.cases.get(), rig.folder.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("nothing was run: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A backend, memory for operands, and where cases go.
struct Rig {
    stream: Arc<dyn Stream>,
    arena: Arena,
    /// Variants of kernels; products have all of them.
    sets: Vec<(&'static str, KernelSet)>,
    updates: Option<UpdateKernels>,
    tiny: bool,
    folder: PathBuf,
    cases: Cell<usize>,
}

impl Rig {
    fn new(settings: Settings) -> Result<Self, DeviceError> {
        let Settings { output: folder, card, tiny, .. } = settings;
        let bytes = if tiny { ARENA_BYTES_TINY } else { ARENA_BYTES };
        let cases = Cell::new(0);
        let Some(number) = card else {
            let device = HostDevice::unified();
            let (stream, arena) = (device.stream(StreamKind::Compute)?, device.arena(bytes)?);
            let sets = vec![("cpu", cpu::kernel_set(2))];
            return Ok(Self { stream, arena, sets, updates: None, tiny, folder, cases });
        };
        let device = CudaDevice::open(number)?;
        let stream = device.compute_stream();
        let set = |own_products, plain_kernels| {
            with_config(&device, stream, CudaConfig { own_products, plain_kernels })
        };
        let mut sets = vec![("own", set(true, false)?), ("plain", set(true, true)?)];
        if Library::CublasLt.is_found() {
            sets.push(("cublaslt", set(false, false)?));
        } else {
            eprintln!("cuBLASLt was not found: only own products");
        }
        let updates = Some(update_kernels(&device, stream)?);
        let (arena, stream) = (device.arena(bytes)?, Arc::clone(stream) as Arc<dyn Stream>);
        Ok(Self { stream, arena, sets, updates, tiny, folder, cases })
    }

    /// The set that runs what has no variants.
    fn kernels(&self) -> &KernelSet {
        &self.sets[0].1
    }

    /// Sets whose attention differs.
    fn sets_of_attention(&self) -> impl Iterator<Item = &(&'static str, KernelSet)> {
        self.sets.iter().filter(|(variant, _)| *variant != "cublaslt")
    }

    /// One list of sizes or the other.
    fn sizes<T: Copy>(&self, full: &[T], tiny: &[T]) -> Vec<T> {
        if self.tiny { tiny.to_vec() } else { full.to_vec() }
    }

    /// A case of an operation without variants.
    fn case(&self, op: &'static str, name: String) -> Case<'_> {
        self.case_of(op, self.sets[0].0, name)
    }

    fn case_of(&self, op: &'static str, variant: &'static str, name: String) -> Case<'_> {
        self.cases.set(self.cases.get() + 1);
        Case::new(self, self.cases.get(), op, variant, name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every part runs, and every result was written: nothing of it is still not-a-number.
    #[test]
    fn cases_hold_finite_results() {
        let folder = std::env::temp_dir().join(format!("kernel-dump-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for cases");
        let settings = Settings { output: folder.clone(), card: None, tiny: true, only: Vec::new() };
        let rig = Rig::new(settings).expect("the CPU is there");
        PARTS.iter().for_each(|(_, run)| run(&rig));
        let mut results = 0;
        for entry in std::fs::read_dir(&folder).expect("the folder of cases") {
            let path = entry.expect("an entry").path();
            let bytes = std::fs::read(&path).expect("a case");
            let case = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
            for (name, tensor) in case.iter().filter(|(name, _)| name.starts_with("out.")) {
                assert!(case::is_finite(tensor.dtype(), tensor.data()), "{name} of {}", path.display());
                results += 1;
            }
        }
        assert!(results > rig.cases.get() && rig.cases.get() > 100, "{results} of {}", rig.cases.get());
        std::fs::remove_dir_all(&folder).expect("the folder of cases");
    }
}
