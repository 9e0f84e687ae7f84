//! Kernel sources compiled for the very card, at run time.
//!
//! The binary ships sources, not cubins: there is one per generation of cards, and the CUDA compiler is not needed to build
//! Terrace. NVRTC, CUDA's compiler as a library, takes seconds for all kernels, so images are kept in a folder
//! (`cache.rs`). Where there is no NVRTC, PTX that was compiled elsewhere ([`Compiler::write_prebuilt`]) will do; the driver turns
//! it into machine code.

use super::cache::Cache;
use super::device::{CAPABILITY_MIN, Capability, CudaDevice};
use super::driver;
use super::library::Library;
use super::nvrtc;
use crate::DeviceError;
use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// What is to be compiled.
#[derive(Debug, Clone, Copy, Default)]
pub struct Source<'a> {
    /// The file's name, for messages and the cache.
    pub name: &'a str,
    /// CUDA C++.
    pub text: &'a str,
    /// Files that it includes, by the name that it includes them by.
    pub headers: &'a [(&'a str, &'a str)],
    /// Options of NVRTC; the architecture is added.
    pub options: &'a [&'a str],
}

/// Compiled kernels, ready to be loaded.
#[derive(Debug, Clone)]
pub struct Image {
    /// Name of the source.
    pub source_name: String,
    /// Cubin or PTX.
    pub bytes: Vec<u8>,
    /// How it came about.
    pub origin: Origin,
}

/// How an image came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Compiled now.
    Compiled,
    /// Found in the folder of compiled images.
    Cached,
    /// Compiled elsewhere.
    Prebuilt,
}

/// Compiles for one generation of cards.
#[derive(Debug, Clone)]
pub struct Compiler {
    capability: Capability,
    cache: Option<PathBuf>,
    prebuilt: Option<PathBuf>,
}

/// What NVRTC is told to produce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    /// Machine code of this very card. Features that only its generation has (`sm_90a`) are not asked for: no kernel uses one, and
    /// older compilers that know the generation do not know them.
    Cubin(Capability),
    /// For a card that is newer than the compiler: code of the newest generation it knows, which the driver translates.
    Ptx(u32),
}

impl Compiler {
    /// A compiler for this device, which keeps its images in [`default_cache`](Self::default_cache) and looks for others' in
    /// [`default_prebuilt`](Self::default_prebuilt).
    pub fn new(device: &CudaDevice) -> Self {
        let capability = device.properties().capability;
        Self { capability, cache: Self::default_cache(), prebuilt: Self::default_prebuilt() }
    }

    /// Keeps images in `folder`, or nowhere.
    #[must_use]
    pub fn with_cache(self, folder: Option<PathBuf>) -> Self {
        Self { cache: folder, ..self }
    }

    /// Takes PTX from `folder` where there is no NVRTC, or from nowhere.
    #[must_use]
    pub fn with_prebuilt(self, folder: Option<PathBuf>) -> Self {
        Self { prebuilt: folder, ..self }
    }

    /// `$TERRACE_PTX`, else the folder `ptx` beside the program.
    pub fn default_prebuilt() -> Option<PathBuf> {
        let named = std::env::var_os("TERRACE_PTX").map(PathBuf::from);
        named.or_else(|| Some(std::env::current_exe().ok()?.parent()?.join("ptx")))
    }

    /// Writes PTX of a source to `folder`, for [`compile`](Self::compile) where there is no NVRTC. It is for the oldest generation that
    /// kernels run on, so that it can be translated for every card; drivers that are older than the NVRTC refuse it. Needs NVRTC, but no
    /// card.
    ///
    /// # Errors
    /// There is no compiler, the source does not compile, or the file cannot be written.
    pub fn write_prebuilt(source: &Source<'_>, folder: &Path) -> Result<(), DeviceError> {
        let nvrtc = Nvrtc::open(source.name)?;
        let target = Target::Ptx(CAPABILITY_MIN.number());
        let bytes = nvrtc.compile(source, &nvrtc.options(target, source.options), target)?;
        let file = Cache::of_prebuilt(folder, source);
        file.write(&bytes);
        if file.read().as_deref() != Some(&*bytes) {
            let detail = format!("its PTX cannot be written to {}", folder.display());
            return Err(DeviceError::Compile {
                source_name: source.name.to_owned(),
                detail,
                log: String::new(),
            });
        }
        Ok(())
    }

    /// `$XDG_CACHE_HOME/terrace/kernels`, else `~/.cache/terrace/kernels`.
    pub fn default_cache() -> Option<PathBuf> {
        let absolute =
            |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let root = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")))?;
        Some(root.join("terrace/kernels"))
    }

    /// The source's image: from the cache, else compiled, else prebuilt.
    ///
    /// A cache that cannot be read or written costs time only; a damaged entry is compiled anew and replaced.
    ///
    /// # Errors
    /// The source does not compile (with the compiler's messages), or there is no compiler.
    pub fn compile(&self, source: &Source<'_>) -> Result<Image, DeviceError> {
        let image = |bytes, origin| Image { source_name: source.name.to_owned(), bytes, origin };
        // Compilers are no faster side by side, and who waits finds in the cache what it waited for.
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let prebuilt = || Cache::of_prebuilt(self.prebuilt.as_deref()?, source).read();
        let nvrtc = match Nvrtc::open(source.name) {
            Ok(nvrtc) => nvrtc,
            Err(missing) => {
                let bytes = prebuilt().ok_or_else(|| self.without_prebuilt(missing))?;
                return Ok(image(bytes, Origin::Prebuilt));
            }
        };
        // What it compiles the driver would refuse.
        if driver::version_if_started().is_some_and(|(major, _)| nvrtc.version.0 > major)
            && let Some(bytes) = prebuilt()
        {
            return Ok(image(bytes, Origin::Prebuilt));
        }
        let target = nvrtc.target(self.capability);
        let options = nvrtc.options(target, source.options);
        let cache = self.cache.as_deref().map(|folder| Cache::new(folder, source, &options, nvrtc.version));
        if let Some(bytes) = cache.as_ref().and_then(Cache::read) {
            return Ok(image(bytes, Origin::Cached));
        }
        let bytes = nvrtc.compile(source, &options, target)?;
        if let Some(cache) = cache {
            cache.write(&bytes);
        }
        Ok(image(bytes, Origin::Compiled))
    }
}

impl Compiler {
    /// Adds to what is missing that there is no PTX either.
    fn without_prebuilt(&self, missing: DeviceError) -> DeviceError {
        match (missing, &self.prebuilt) {
            (DeviceError::NoCompiler { source_name, detail, package }, Some(folder)) => {
                let detail = format!("{detail}, and PTX of this version's kernels in {}", folder.display());
                DeviceError::NoCompiler { source_name, detail, package }
            }
            (missing, _) => missing,
        }
    }
}

/// The Python package of the newest NVRTC whose code the driver loads.
fn wheel() -> &'static str {
    match driver::version_if_started() {
        Some((11, _)) => "nvidia-cuda-nvrtc-cu11",
        Some((12, _)) => "nvidia-cuda-nvrtc-cu12",
        _ => "nvidia-cuda-nvrtc",
    }
}

/// What an image is of that a driver may be too old for, if there is such a thing, and what to do then.
pub(super) fn newer_than_driver(image: &[u8]) -> Option<String> {
    let (major, minor) = driver::version_if_started()?;
    let supports = format!("and the driver supports CUDA {major}.{minor}: update the driver");
    if let Some(version) = ptx_version(image) {
        return Some(format!("it is PTX {version}, {supports}, or take PTX that an older NVRTC wrote"));
    }
    let (newer, its_minor, _) = Library::Nvrtc.version().filter(|(newer, ..)| *newer > major)?;
    Some(format!("NVRTC {newer}.{its_minor} compiled it, {supports}, or `pip install {}`", wheel()))
}

/// The version of the language that PTX says it is in; `None` for machine code.
fn ptx_version(image: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(image).ok()?;
    let mut words = text.lines().map(str::split_whitespace);
    words.find_map(|mut words| words.next().filter(|word| *word == ".version").and(words.next()))
}

/// The compiler's library, found and asked for its version.
#[derive(Debug)]
struct Nvrtc {
    path: &'static Path,
    version: (u32, u32),
}

impl Nvrtc {
    fn open(source_name: &str) -> Result<Self, DeviceError> {
        let search = Library::Nvrtc.open();
        let refusal = |detail| {
            let (source_name, package) = (source_name.to_owned(), wheel());
            DeviceError::NoCompiler { source_name, detail, package }
        };
        let Some(path) = &search.found else {
            let looked_in = search.looked_in.join(", ");
            return Err(refusal(format!("NVRTC (libnvrtc.so) was looked for in {looked_in}")));
        };
        let missing = nvrtc::missing();
        if !missing.is_empty() {
            let missing = missing.join(", ");
            return Err(refusal(format!(
                "{} is too old (11.2 would do): it lacks {missing}",
                path.display()
            )));
        }
        let version = Library::Nvrtc.version();
        let (major, minor, _) =
            version.ok_or_else(|| refusal(format!("{} gives no version", path.display())))?;
        Ok(Self { path, version: (major, minor) })
    }

    fn target(&self, capability: Capability) -> Target {
        let known = architectures();
        let number = capability.number();
        // An empty list, of a compiler that cannot say, is taken for one that knows the card.
        if known.is_empty() || known.contains(&number) {
            return Target::Cubin(capability);
        }
        let newest = known.iter().copied().filter(|&known| known < number).max();
        newest.map_or(Target::Cubin(capability), Target::Ptx)
    }

    fn options(&self, target: Target, own: &[&str]) -> Vec<String> {
        let mut options = vec![target.option()];
        options.extend(own.iter().map(|&option| option.to_owned()));
        // CUDA's own headers (cuda_bf16.h) lie beside the library, in a toolkit as in a wheel.
        let beside = self
            .path
            .parent()
            .into_iter()
            .flat_map(|folder| ["../include", "../../../include"].map(|i| folder.join(i)));
        let headers = beside.filter(|folder| folder.join("cuda_fp16.h").exists()).take(1);
        options.extend(headers.map(|folder| format!("--include-path={}", folder.display())));
        options
    }

    fn compile(
        &self,
        source: &Source<'_>,
        options: &[String],
        target: Target,
    ) -> Result<Vec<u8>, DeviceError> {
        let refusal = |detail: String, log| DeviceError::Compile {
            source_name: source.name.to_owned(),
            detail: format!("NVRTC {}.{}: {detail}", self.version.0, self.version.1),
            log,
        };
        let program = Program::new(source).map_err(|detail| refusal(detail, String::new()))?;
        let options: Result<Vec<CString>, _> =
            options.iter().map(|option| CString::new(option.as_str())).collect();
        let options =
            options.map_err(|_| refusal("an option holds a zero byte".to_owned(), String::new()))?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).expect("options are few");
        // SAFETY: the program is alive; as many strings as are counted, which live until the call returns.
        let result = unsafe { nvrtc::nvrtcCompileProgram(program.raw, count, pointers.as_ptr()) };
        if result != nvrtcResult::NVRTC_SUCCESS {
            return Err(refusal(describe(result), program.log()));
        }
        program.image(target).map_err(|detail| refusal(detail, program.log()))
    }
}

impl Target {
    fn option(self) -> String {
        match self {
            Self::Cubin(capability) => format!("--gpu-architecture=sm_{}", capability.number()),
            Self::Ptx(number) => format!("--gpu-architecture=compute_{number}"),
        }
    }
}

/// Generations that a loaded NVRTC knows, as 90 for 9.0; empty if it does not say.
fn architectures() -> Vec<u32> {
    let mut count = 0;
    // SAFETY: the library was found; `count` is writable.
    let result = unsafe { nvrtc::nvrtcGetNumSupportedArchs(&raw mut count) };
    if result != nvrtcResult::NVRTC_SUCCESS {
        return Vec::new();
    }
    let mut numbers: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
    // SAFETY: room for as many numbers as the library said it has.
    let result = unsafe { nvrtc::nvrtcGetSupportedArchs(numbers.as_mut_ptr()) };
    if result != nvrtcResult::NVRTC_SUCCESS {
        return Vec::new();
    }
    numbers.into_iter().map(c_int::unsigned_abs).collect()
}

fn describe(result: nvrtcResult) -> String {
    // SAFETY: the library gave the result; it answers with a constant.
    let text = unsafe { nvrtc::nvrtcGetErrorString(result) };
    if text.is_null() {
        return format!("{result:?}");
    }
    // SAFETY: a constant of the library, which stays loaded.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A source in NVRTC's hands.
#[derive(Debug)]
struct Program {
    raw: nvrtcProgram,
    /// Text, name and headers, and the arrays of their addresses: the program may refer to them while it lives.
    _strings: Vec<CString>,
    _addresses: [Vec<*const c_char>; 2],
}

impl Program {
    fn new(source: &Source<'_>) -> Result<Self, String> {
        let c = |text: &str| CString::new(text).map_err(|_| "the source holds a zero byte".to_owned());
        let mut strings = vec![c(source.text)?, c(source.name)?];
        for (name, text) in source.headers {
            strings.extend([c(name)?, c(text)?]);
        }
        let pointer = |string: &CString| string.as_ptr();
        let names: Vec<*const c_char> = strings[2..].iter().step_by(2).map(pointer).collect();
        let texts: Vec<*const c_char> = strings[2..].iter().skip(1).step_by(2).map(pointer).collect();
        let count = c_int::try_from(source.headers.len()).expect("headers are few");
        let mut raw = std::ptr::null_mut();
        // SAFETY: strings that end in zeros, and arrays of as many as are counted, all of which the value keeps as long as the program.
        let result = unsafe {
            nvrtc::nvrtcCreateProgram(
                &raw mut raw,
                strings[0].as_ptr(),
                strings[1].as_ptr(),
                count,
                texts.as_ptr(),
                names.as_ptr(),
            )
        };
        if result == nvrtcResult::NVRTC_SUCCESS {
            Ok(Self { raw, _strings: strings, _addresses: [names, texts] })
        } else {
            Err(describe(result))
        }
    }

    fn log(&self) -> String {
        // SAFETY: the program is alive; sizes and buffers are as NVRTC says (`read`).
        let log = self.read(
            |size| unsafe { nvrtc::nvrtcGetProgramLogSize(self.raw, size) },
            // SAFETY: as above.
            |at| unsafe { nvrtc::nvrtcGetProgramLog(self.raw, at) },
        );
        let log = log.unwrap_or_else(|detail| {
            format!("(the compiler's messages cannot be read: {detail})").into_bytes()
        });
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }

    fn image(&self, target: Target) -> Result<Vec<u8>, String> {
        match target {
            // SAFETY: the program is alive and compiled; sizes and buffers are as NVRTC says (`read`).
            Target::Cubin(_) => self.read(
                |size| unsafe { nvrtc::nvrtcGetCUBINSize(self.raw, size) },
                // SAFETY: as above.
                |at| unsafe { nvrtc::nvrtcGetCUBIN(self.raw, at) },
            ),
            // SAFETY: as above.
            Target::Ptx(_) => self.read(
                |size| unsafe { nvrtc::nvrtcGetPTXSize(self.raw, size) },
                // SAFETY: as above.
                |at| unsafe { nvrtc::nvrtcGetPTX(self.raw, at) },
            ),
        }
    }

    /// Reads one of a program's results: asks for its size, then has it written to a buffer of that size.
    fn read(
        &self,
        size: impl FnOnce(*mut usize) -> nvrtcResult,
        write: impl FnOnce(*mut c_char) -> nvrtcResult,
    ) -> Result<Vec<u8>, String> {
        let mut bytes = 0;
        let ok = |result| if result == nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(describe(result)) };
        ok(size(&raw mut bytes))?;
        let mut buffer = vec![0u8; bytes];
        ok(write(buffer.as_mut_ptr().cast()))?;
        Ok(buffer)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { nvrtc::nvrtcDestroyProgram(&raw mut self.raw) };
    }
}
