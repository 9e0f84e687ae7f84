//! The driver's results as errors, and its one-time start.

use super::library::Library;
use crate::DeviceError;
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

/// Functions that the backend calls. cudarc panics at the first call of one that the driver does not have, so they are
/// looked up once, before any is called.
const FUNCTIONS: &[&CStr] = &[
    c"cuInit",
    c"cuDriverGetVersion",
    c"cuGetErrorName",
    c"cuGetErrorString",
    c"cuDeviceGet",
    c"cuDeviceGetCount",
    c"cuDeviceGetName",
    c"cuDeviceTotalMem_v2",
    c"cuDeviceGetAttribute",
    c"cuDeviceGetPCIBusId",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuCtxGetCurrent",
    c"cuCtxSetCurrent",
    c"cuMemAlloc_v2",
    c"cuMemFree_v2",
    c"cuMemGetInfo_v2",
    c"cuMemHostAlloc",
    c"cuMemFreeHost",
    c"cuMemHostRegister_v2",
    c"cuMemHostUnregister",
    c"cuMemcpyHtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyDtoDAsync_v2",
    c"cuMemsetD8Async",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuEventQuery",
    c"cuEventSynchronize",
    c"cuEventElapsedTime",
    c"cuModuleLoadDataEx",
    c"cuModuleUnload",
    c"cuModuleGetFunction",
    c"cuFuncGetAttribute",
    c"cuFuncSetAttribute",
    c"cuLaunchKernel",
];

/// Loads and starts the driver, once per process.
pub(super) fn start() -> Result<(), DeviceError> {
    static STARTED: OnceLock<Result<(), DeviceError>> = OnceLock::new();
    STARTED.get_or_init(start_once).clone()
}

fn start_once() -> Result<(), DeviceError> {
    let search = Library::Driver.open();
    let Some(path) = &search.found else {
        let detail = format!("libcuda.so.1 was looked for in {}", search.looked_in.join(", "));
        return Err(DeviceError::NoDriver { detail });
    };
    let missing: Vec<_> =
        FUNCTIONS.iter().filter(|name| !has(name)).map(|name| name.to_string_lossy()).collect();
    let unusable = |why: String| DeviceError::UnusableDriver { detail: format!("{} {why}", path.display()) };
    if !missing.is_empty() {
        return Err(unusable(format!("is too old, install a newer one: it lacks {}", missing.join(", "))));
    }
    // SAFETY: the library is loaded and has the function; it may be called from any thread.
    let result = unsafe { sys::cuInit(0) };
    match result {
        // A driver that starts without a device counts none (`device_count`).
        CUresult::CUDA_SUCCESS | CUresult::CUDA_ERROR_NO_DEVICE => Ok(()),
        CUresult::CUDA_ERROR_STUB_LIBRARY => Err(unusable(
            "is the toolkit's stub; take its folder off LD_LIBRARY_PATH so that the driver's own is found"
                .to_owned(),
        )),
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => Err(unusable(format!(
            "does not start: {}; restart the machine if its driver was updated",
            describe(result)
        ))),
        other => Err(unusable(format!("does not start: {}", describe(other)))),
    }
}

fn has(function: &CStr) -> bool {
    // SAFETY: `Library::open` found the driver under a name that cudarc asks for, so this loads it; the symbol is looked up
    // and not called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(function.to_bytes_with_nul()).is_ok() }
}

/// The newest CUDA that the driver supports, as major and minor.
pub(super) fn version() -> Result<(u32, u32), DeviceError> {
    let mut version: c_int = 0;
    // SAFETY: the driver was started; `version` is writable.
    check(unsafe { sys::cuDriverGetVersion(&raw mut version) }, "asking the driver's version")?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// As [`version`], where there is a driver that starts.
pub(super) fn version_if_started() -> Option<(u32, u32)> {
    start().and_then(|()| version()).ok()
}

/// A result as an error that says what was being done.
pub(super) fn check(result: CUresult, doing: &str) -> Result<(), DeviceError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(failure(other, doing)),
    }
}

/// The error of a result that is not success.
pub(super) fn failure(result: CUresult, doing: &str) -> DeviceError {
    let (doing, detail) = (doing.to_owned(), describe(result));
    if ends_context(result) {
        DeviceError::Lost { doing, detail }
    } else {
        DeviceError::Driver { doing, detail }
    }
}

/// Whether the context is unusable from now on ("sticky" errors).
fn ends_context(result: CUresult) -> bool {
    use CUresult::{
        CUDA_ERROR_ASSERT, CUDA_ERROR_CONTAINED, CUDA_ERROR_CONTEXT_IS_DESTROYED,
        CUDA_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_EXTERNAL_DEVICE, CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_INSTRUCTION, CUDA_ERROR_INVALID_ADDRESS_SPACE,
        CUDA_ERROR_INVALID_PC, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_MISALIGNED_ADDRESS, CUDA_ERROR_NVLINK_UNCORRECTABLE, CUDA_ERROR_UNKNOWN,
    };
    matches!(
        result,
        CUDA_ERROR_ASSERT
            | CUDA_ERROR_CONTAINED
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_EXTERNAL_DEVICE
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_UNKNOWN
    )
}

/// The driver's name and sentence for a result, with its number.
pub(super) fn describe(result: CUresult) -> String {
    let mut name = std::ptr::null();
    let mut sentence = std::ptr::null();
    // SAFETY: the driver is loaded (only it gives results) and writes the address of a constant, or null.
    unsafe {
        let _ = sys::cuGetErrorName(result, &raw mut name);
        let _ = sys::cuGetErrorString(result, &raw mut sentence);
    }
    let text = |start: *const std::ffi::c_char| {
        // SAFETY: a constant of the driver, which stays loaded.
        (!start.is_null()).then(|| unsafe { CStr::from_ptr(start) }.to_string_lossy())
    };
    let name = text(name).unwrap_or_else(|| format!("{result:?}").into());
    let sentence = text(sentence).unwrap_or_default();
    format!("{name} ({}): {sentence}", result as u32)
}
