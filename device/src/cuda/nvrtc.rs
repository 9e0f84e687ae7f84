//! The functions of NVRTC that the compiler calls, of the library that was chosen for the driver.

use super::library::Library;
use crate::library_functions;
use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};
use std::ffi::{c_char, c_int};

library_functions! {
    Library::Nvrtc;
    fn nvrtcGetErrorString(result: nvrtcResult) -> *const c_char;
    // From 11.2 on.
    fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> nvrtcResult;
    fn nvrtcGetSupportedArchs(numbers: *mut c_int) -> nvrtcResult;
    fn nvrtcCreateProgram(
        program: *mut nvrtcProgram,
        text: *const c_char,
        name: *const c_char,
        count: c_int,
        headers: *const *const c_char,
        names: *const *const c_char,
    ) -> nvrtcResult;
    fn nvrtcDestroyProgram(program: *mut nvrtcProgram) -> nvrtcResult;
    fn nvrtcCompileProgram(
        program: nvrtcProgram,
        count: c_int,
        options: *const *const c_char,
    ) -> nvrtcResult;
    fn nvrtcGetProgramLogSize(program: nvrtcProgram, bytes: *mut usize) -> nvrtcResult;
    fn nvrtcGetProgramLog(program: nvrtcProgram, log: *mut c_char) -> nvrtcResult;
    // From 11.1 on.
    fn nvrtcGetCUBINSize(program: nvrtcProgram, bytes: *mut usize) -> nvrtcResult;
    fn nvrtcGetCUBIN(program: nvrtcProgram, image: *mut c_char) -> nvrtcResult;
    fn nvrtcGetPTXSize(program: nvrtcProgram, bytes: *mut usize) -> nvrtcResult;
    fn nvrtcGetPTX(program: nvrtcProgram, image: *mut c_char) -> nvrtcResult;
}
