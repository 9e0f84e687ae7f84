//! Finding the CUDA libraries at run time.
//!
//! cudarc loads a library by name and panics when there is none, so nothing of it is called before [`Library::open`] has
//! succeeded. A library outside the loader's search path (a toolkit, a Python wheel) is loaded here by its full path; the
//! loader then finds it again by its name, which is how cudarc asks.

use std::ffi::{CStr, CString, OsStr, c_void};
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
        static SEARCHES: [OnceLock<Search>; 3] = [const { OnceLock::new() }; 3];
        SEARCHES[self as usize].get_or_init(|| self.search())
    }

    /// Whether the library was found.
    pub fn is_found(self) -> bool {
        self.open().found.is_some()
    }

    /// The names that cudarc asks the loader for, in its order.
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

    fn search(self) -> Search {
        let names = self.names();
        let own = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
        let mut looked_in = vec![format!("the loader's path (LD_LIBRARY_PATH={own:?}, ld.so.cache)")];
        if let Some(found) = names.iter().find_map(|name| self.load(Path::new(name))) {
            return Search { found: Some(found), looked_in };
        }
        for folder in folders(self) {
            looked_in.push(folder.display().to_string());
            let files = names.iter().map(|name| folder.join(name)).filter(|file| file.exists());
            let loaded = files.filter_map(|file| self.load(&file)).next();
            if loaded.is_some() && self == Self::Nvrtc {
                load_builtins(&folder);
            }
            // The name it gives itself must be one that cudarc asks for.
            if loaded.is_some() && names.iter().any(|name| self.load(Path::new(name)).is_some()) {
                return Search { found: loaded, looked_in };
            }
        }
        Search { found: None, looked_in }
    }

    /// Loads a file and says which one it really was. It stays loaded.
    fn load(self, file: &Path) -> Option<PathBuf> {
        let handle = load(file)?.as_ptr();
        // SAFETY: the handle was just opened and is never closed.
        let landmark = unsafe { libc::dlsym(handle, self.landmark().as_ptr()) };
        // SAFETY: `Dl_info` is plain pointers, for which zero is a value.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is writable; an address that belongs to no library is an error, not a fault.
        if landmark.is_null() || unsafe { libc::dladdr(landmark, &raw mut info) } == 0 {
            return None;
        }
        // SAFETY: dladdr filled in the path of a library that stays loaded.
        let path = unsafe { CStr::from_ptr(info.dli_fname) };
        let path = Path::new(OsStr::from_bytes(path.to_bytes()));
        // Names are links to the file with the full version.
        Some(path.canonicalize().unwrap_or_else(|_| path.to_path_buf()))
    }
}

/// Loads a file for good.
fn load(file: &Path) -> Option<NonNull<c_void>> {
    let file = CString::new(file.as_os_str().as_bytes()).ok()?;
    // SAFETY: a path that ends in a zero. Loading runs the library's initializers; these are NVIDIA's, or whatever the user's
    // search path puts in their place.
    NonNull::new(unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) })
}

/// Loads what NVRTC asks the loader for by name when it compiles, and would not find in its own folder.
fn load_builtins(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_builtins = |name: &OsStr| name.as_bytes().starts_with(b"libnvrtc-builtins.so");
    for entry in entries.filter(|entry| is_builtins(&entry.file_name())) {
        let _ = load(&entry.path());
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
