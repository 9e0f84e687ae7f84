//! The library of kernels that `kernels/shim` describes.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// The interface of the library: `terrace_kernel` in `terrace_shim.hpp`.
#[repr(C)]
struct RawKernel {
    name: *const c_char,
    parameters: c_int,
    parameter_bytes: *const c_uint,
    run: unsafe extern "C" fn(*mut *mut c_void, *const c_uint, *const c_uint, usize),
}

#[derive(Clone, Copy)]
pub struct Library {
    find: unsafe extern "C" fn(*const c_char) -> *const RawKernel,
    order: unsafe extern "C" fn(*const c_char),
}

/// One argument of a kernel.
#[derive(Clone, Copy)]
pub enum Argument {
    Address(u64),
    Long(i64),
    Int(i32),
    Float(f32),
}

/// Threads and memory of a launch.
#[derive(Clone, Copy)]
pub struct Launch {
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared_bytes: usize,
}

/// Orders of execution: the natural one, and two that are drawn.
pub const ORDERS: [Option<&CStr>; 3] = [None, Some(c"1"), Some(c"20241")];

impl Library {
    /// `None` if nobody says where it is.
    pub fn open() -> Option<Self> {
        static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
        *LIBRARY.get_or_init(|| {
            let path = std::env::var("TERRACE_SHIM_LIBRARY").ok()?;
            let path_c = CString::new(path.clone()).unwrap();
            // SAFETY: the library's initializers have no demands.
            let handle = unsafe { libc::dlopen(path_c.as_ptr(), libc::RTLD_NOW) };
            assert!(!handle.is_null(), "{path} can be loaded: {:?}", {
                // SAFETY: after a failure this is a string.
                unsafe { CStr::from_ptr(libc::dlerror()) }
            });
            let symbol = |name: &CStr| {
                // SAFETY: the handle is open and never closed.
                let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
                assert!(!found.is_null(), "{path} has {name:?}");
                found
            };
            // SAFETY: the functions have these types.
            Some(unsafe {
                Self {
                    find: std::mem::transmute::<
                        *mut c_void,
                        unsafe extern "C" fn(*const c_char) -> *const RawKernel,
                    >(symbol(c"terrace_shim_find")),
                    order: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char)>(symbol(
                        c"terrace_shim_order",
                    )),
                }
            })
        })
    }

    /// Runs a kernel to its end, on this thread.
    ///
    /// Addresses must be of memory that is as large as the kernel takes it to be: this is for tests, which say so once
    /// here instead of at every call.
    pub fn run(&self, name: &str, launch: Launch, order: Option<&'static CStr>, arguments: &[Argument]) {
        let name_c = CString::new(name).unwrap();
        // SAFETY: a kernel that is found is static.
        let kernel = unsafe { (self.find)(name_c.as_ptr()).as_ref() };
        let kernel = kernel.unwrap_or_else(|| panic!("there is a kernel {name}"));
        // SAFETY: the array has as many elements as there are parameters.
        let sizes = unsafe { std::slice::from_raw_parts(kernel.parameter_bytes, kernel.parameters as usize) };
        let given: Vec<u32> = arguments.iter().map(|argument| argument.bytes().1).collect();
        assert_eq!(sizes, given, "sizes of {name}'s parameters");
        let mut words: Vec<[u8; 8]> = arguments.iter().map(|argument| argument.bytes().0).collect();
        let mut addresses: Vec<*mut c_void> = words.iter_mut().map(|word| word.as_mut_ptr().cast()).collect();
        // SAFETY: arguments have the parameters' sizes; what is behind addresses is the caller's part.
        unsafe {
            (self.order)(order.map_or(std::ptr::null(), CStr::as_ptr));
            (kernel.run)(
                addresses.as_mut_ptr(),
                launch.grid.as_ptr(),
                [launch.threads, 1, 1].as_ptr(),
                launch.shared_bytes,
            );
        }
    }
}

impl Argument {
    fn bytes(self) -> ([u8; 8], u32) {
        let mut word = [0; 8];
        let mut put = |bytes: &[u8]| {
            word[..bytes.len()].copy_from_slice(bytes);
            bytes.len() as u32
        };
        let size = match self {
            Self::Address(address) => put(&address.to_ne_bytes()),
            Self::Long(value) => put(&value.to_ne_bytes()),
            Self::Int(value) => put(&value.to_ne_bytes()),
            Self::Float(value) => put(&value.to_ne_bytes()),
        };
        (word, size)
    }
}
