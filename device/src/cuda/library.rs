//! Finding the CUDA libraries at run time.
//!
//! cudarc loads the driver by name and panics when there is none, so nothing of it is called before [`Library::open`] has
//! succeeded. A driver outside the loader's search path is loaded here by its full path; the loader then finds it again by its
//! name, which is how cudarc asks.
//!
//! The other libraries come in several versions, of which a machine may have more than one (a toolkit, Python wheels), and those of a
//! newer CUDA than the driver's do not work with it: the driver refuses their code. cudarc would take the newest, so their functions
//! are looked up here ([`library_functions`](crate::library_functions)), in the first library that is not newer than the driver.

use super::driver;
use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// A library of CUDA's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// The driver's interface, which comes with the driver.
    Driver,
    /// The compiler of kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
}

/// Where a library is, or where it was looked for.
#[derive(Debug, Clone)]
pub struct Search {
    /// The file that was loaded.
    pub found: Option<PathBuf>,
    /// Places that were tried, in order; the first stands for the loader's own search.
    pub looked_in: Vec<String>,
}

impl Library {
    /// Every library that the backend may use.
    pub const ALL: [Self; 3] = [Self::Driver, Self::Nvrtc, Self::CublasLt];

    /// The file's name without a version.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "libcuda.so",
            Self::Nvrtc => "libnvrtc.so",
            Self::CublasLt => "libcublasLt.so",
        }
    }

    /// Loads the library unless it is loaded already, and says where it was found. It stays loaded.
    pub fn open(self) -> &'static Search {
        &self.opened().0
    }

    /// The address of its function of this name, if it was found and has one.
    pub fn function(self, name: &CStr) -> Option<NonNull<c_void>> {
        self.opened().1.as_ref()?.function(name)
    }

    /// Its version, if it was found and says; the driver's is another matter.
    pub(super) fn version(self) -> Option<(u32, u32, u32)> {
        self.version_of(self.opened().1.as_ref()?)
    }

    fn opened(self) -> &'static (Search, Option<Handle>) {
        static SEARCHES: [OnceLock<(Search, Option<Handle>)>; 3] = [const { OnceLock::new() }; 3];
        SEARCHES[self as usize].get_or_init(|| self.search())
    }

    /// Whether the library was found.
    pub fn is_found(self) -> bool {
        self.open().found.is_some()
    }

    /// The names of its versions, in cudarc's order: newer ones come first.
    fn names(self) -> Vec<String> {
        let stem = self.name().trim_start_matches("lib").trim_end_matches(".so");
        cudarc::get_lib_name_candidates(stem)
    }

    /// A function that every version has.
    fn landmark(self) -> &'static CStr {
        match self {
            Self::Driver => c"cuInit",
            Self::Nvrtc => c"nvrtcVersion",
            Self::CublasLt => c"cublasLtGetVersion",
        }
    }

    fn search(self) -> (Search, Option<Handle>) {
        let names = self.names();
        let own = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let mut looked_in = vec![format!("the loader's path (LD_LIBRARY_PATH={own:?}, ld.so.cache)")];
        let mut best = Best::of(self);
        best.offer(names.iter().filter_map(|name| self.load(Path::new(name))));
        for folder in folders(self) {
            if best.fits() {
                break;
            }
            looked_in.push(folder.display().to_string());
            let files = names.iter().map(|name| folder.join(name)).filter(|file| file.exists());
            let loaded: Vec<_> = files.filter_map(|file| self.load(&file)).collect();
            if !loaded.is_empty() && self == Self::Nvrtc {
                load_builtins(&folder);
            }
            // The name it gives itself must be one that cudarc asks for.
            if self != Self::Driver || names.iter().any(|name| self.load(Path::new(name)).is_some()) {
                best.offer(loaded.into_iter());
            }
        }
        let (found, handle) = best.found.map_or((None, None), |(path, handle)| (Some(path), Some(handle)));
        (Search { found, looked_in }, handle)
    }

    /// Loads a file and says which one it really was. It stays loaded.
    fn load(self, file: &Path) -> Option<(PathBuf, Handle)> {
        let handle = Handle::open(file)?;
        let landmark = handle.function(self.landmark())?;
        // SAFETY: `Dl_info` is plain pointers, for which zero is a value.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is writable; an address that belongs to no library is an error, not a fault.
        if unsafe { libc::dladdr(landmark.as_ptr(), &raw mut info) } == 0 {
            return None;
        }
        // SAFETY: dladdr filled in the path of a library that stays loaded.
        let path = unsafe { CStr::from_ptr(info.dli_fname) };
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        // Names are links to the file with the full version.
        Some((path.canonicalize().unwrap_or_else(|_| path.to_path_buf()), handle))
    }

    /// The version of a loaded library, if it says.
    fn version_of(self, handle: &Handle) -> Option<(u32, u32, u32)> {
        let landmark = handle.function(self.landmark())?.as_ptr();
        match self {
            Self::Driver => None,
            Self::Nvrtc => {
                type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
                let (mut major, mut minor) = (0, 0);
                // SAFETY: the function's documented signature.
                let version: Version = unsafe { std::mem::transmute(landmark) };
                // SAFETY: both are writable.
                let result = unsafe { version(&raw mut major, &raw mut minor) };
                (result == 0).then_some((major.unsigned_abs(), minor.unsigned_abs(), 0))
            }
            Self::CublasLt => {
                type Version = unsafe extern "C" fn() -> usize;
                // SAFETY: the function's documented signature.
                let version: Version = unsafe { std::mem::transmute(landmark) };
                // SAFETY: it only says a number: 130001 is 13.0.1, as 120803 is 12.8.3.
                let version = u32::try_from(unsafe { version() }).ok()?;
                Some((version / 10_000, version / 100 % 100, version % 100))
            }
        }
    }
}

/// The first of several libraries that is not newer than the driver, else the first.
struct Best {
    library: Library,
    /// The version of CUDA that a library may be of; `None` where there is no driver to ask.
    newest: Option<u32>,
    found: Option<(PathBuf, Handle)>,
}

impl Best {
    fn of(library: Library) -> Self {
        let newest = if library == Library::Driver { None } else { driver::version_if_started() };
        Self { library, newest: newest.map(|(major, _)| major), found: None }
    }

    fn fits(&self) -> bool {
        self.found.as_ref().is_some_and(|(_, handle)| self.takes(handle))
    }

    fn takes(&self, handle: &Handle) -> bool {
        let of = |handle| self.library.version_of(handle).map_or(0, |(major, ..)| major);
        self.newest.is_none_or(|newest| of(handle) <= newest)
    }

    fn offer(&mut self, loaded: impl Iterator<Item = (PathBuf, Handle)>) {
        for (path, handle) in loaded {
            if self.fits() {
                return;
            }
            if self.found.is_none() || self.takes(&handle) {
                self.found = Some((path, handle));
            }
        }
    }
}

/// A library that is loaded for good.
#[derive(Debug)]
struct Handle(NonNull<c_void>);

// SAFETY: the loader's functions may be called from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    fn open(file: &Path) -> Option<Self> {
        let file = CString::new(file.as_os_str().as_bytes()).ok()?;
        // SAFETY: a path that ends in a zero. Loading runs the library's initializers; these are NVIDIA's, or whatever the user's
        // search path puts in their place.
        NonNull::new(unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) }).map(Self)
    }

    fn function(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is never closed.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

/// Declares functions of a [`Library`], by the names and types of its header. Each is looked up at its first call, which must not be
/// made where `missing` names one.
#[macro_export]
macro_rules! library_functions {
    ($library:expr; $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty;)+) => {
        /// The functions that the library lacks; all if it was not found.
        pub(super) fn missing() -> Vec<&'static str> {
            let names = [$(concat!(stringify!($name), "\0")),+];
            let lacks = |name: &str| {
                let name = std::ffi::CStr::from_bytes_with_nul(name.as_bytes()).expect("it ends in a zero");
                $library.function(name).is_none()
            };
            names.into_iter().filter(|name| lacks(name)).map(|name| name.trim_end_matches('\0')).collect()
        }

        $(
            #[allow(non_snake_case, clippy::too_many_arguments, reason = "as in the library's header")]
            pub(super) unsafe fn $name($($arg: $type),*) -> $result {
                type Function = unsafe extern "C" fn($($type),*) -> $result;
                static FUNCTION: std::sync::OnceLock<Function> = std::sync::OnceLock::new();
                let function = FUNCTION.get_or_init(|| {
                    let name = concat!(stringify!($name), "\0").as_bytes();
                    let name = std::ffi::CStr::from_bytes_with_nul(name).expect("it ends in a zero");
                    let address = $library.function(name).expect("whoever calls it asked whether it is missing");
                    // SAFETY: the signature in the library's header; the library stays loaded.
                    unsafe { std::mem::transmute::<std::ptr::NonNull<std::ffi::c_void>, Function>(address) }
                });
                // SAFETY: the caller's promises are those of the library's documentation.
                unsafe { function($($arg),*) }
            }
        )+
    };
}

/// Loads what NVRTC asks the loader for by name when it compiles, and would not find in its own folder.
fn load_builtins(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_builtins = |name: &OsStr| name.as_bytes().starts_with(b"libnvrtc-builtins.so");
    for entry in entries.filter(|entry| is_builtins(&entry.file_name())) {
        let _ = Handle::open(&entry.path());
    }
}

/// Folders beyond the loader's search path where installations put the library.
fn folders(library: Library) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    if library == Library::Driver {
        let usual = ["/usr/lib/wsl/lib", "/usr/local/nvidia/lib64", "/run/opengl-driver/lib"];
        folders.extend(usual.map(PathBuf::from));
        return folders;
    }
    let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    for root in ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"].into_iter().filter_map(variable) {
        folders.push(root.join("lib64"));
        folders.push(root.join("targets/x86_64-linux/lib"));
    }
    folders.extend(["/usr/local/cuda/lib64", "/opt/cuda/lib64"].map(PathBuf::from));
    for prefix in ["CONDA_PREFIX", "VIRTUAL_ENV"].into_iter().filter_map(variable) {
        folders.push(prefix.join("lib"));
        folders.extend(wheels(&prefix.join("lib"), library));
    }
    folders.extend(["/usr/local/lib", "/usr/lib"].iter().flat_map(|lib| wheels(Path::new(lib), library)));
    folders
}

/// The folders of NVIDIA's Python wheels below `lib`: `python3.x/site-packages/nvidia/…/lib`.
fn wheels(lib: &Path, library: Library) -> Vec<PathBuf> {
    let of_twelve = if library == Library::Nvrtc { "cuda_nvrtc" } else { "cublas" };
    let Ok(entries) = std::fs::read_dir(lib) else { return Vec::new() };
    let pythons = entries.flatten().map(|entry| entry.path());
    let mut pythons: Vec<_> = pythons
        .filter(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"python")))
        .collect();
    pythons.sort();
    let packages =
        pythons.iter().flat_map(|python| ["site-packages", "dist-packages"].map(|p| python.join(p)));
    let nvidia = packages.map(|packages| packages.join("nvidia")).filter(|nvidia| nvidia.is_dir());
    nvidia.flat_map(|nvidia| ["cu13", of_twelve].map(|wheel| nvidia.join(wheel).join("lib"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_says_where_it_looked() {
        for library in Library::ALL {
            let search = library.open();
            assert!(search.looked_in[0].contains("LD_LIBRARY_PATH"), "{search:?}");
            assert!(search.found.is_some() || search.looked_in.len() > 1, "{search:?}");
        }
    }

    #[test]
    fn wheels_are_found_by_their_layout() {
        let root = std::env::temp_dir().join(format!("terrace-wheels-{}", std::process::id()));
        std::fs::create_dir_all(root.join("python3.12/site-packages/nvidia")).unwrap();
        let found = wheels(&root, Library::Nvrtc);
        std::fs::remove_dir_all(&root).unwrap();
        let nvidia = root.join("python3.12/site-packages/nvidia");
        assert_eq!(found, [nvidia.join("cu13/lib"), nvidia.join("cuda_nvrtc/lib")]);
    }
}
