//! Loaded kernels.

use super::compiler::{self, Image};
use super::context::Context;
use super::device::CudaDevice;
use super::driver::{describe, failure};
use super::stream::CudaStream;
use crate::DeviceError;
use cudarc::driver::sys::{self, CUfunction, CUfunction_attribute as Attribute, CUmodule, CUresult};
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// Bytes of dynamic shared memory that a block may use without asking.
const SHARED_BYTES_DEFAULT: u32 = 48 << 10;

/// Room for what the driver's assembler says about PTX that it refuses.
const LOG_BYTES_MAX: usize = 16 << 10;

/// An image of kernels, loaded on a device.
#[derive(Debug)]
pub struct Module {
    inner: Arc<Loaded>,
}

#[derive(Debug)]
struct Loaded {
    raw: CUmodule,
    shared_bytes_max: u32,
    context: Arc<Context>,
}

// SAFETY: the driver's modules may be used from any thread.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

impl Module {
    /// Loads an image: cubin, or PTX, which the driver compiles now.
    ///
    /// # Errors
    /// The image is for another card, newer than the driver, or damaged.
    pub fn load(device: &Arc<CudaDevice>, image: &[u8]) -> Result<Self, DeviceError> {
        Self::load_named(device, "(image)", image)
    }

    /// As [`load`](Self::load), with the source's name in errors.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn load_image(device: &Arc<CudaDevice>, image: &Image) -> Result<Self, DeviceError> {
        Self::load_named(device, &image.source_name, &image.bytes)
    }

    fn load_named(device: &Arc<CudaDevice>, name: &str, image: &[u8]) -> Result<Self, DeviceError> {
        let context = Arc::clone(device.context());
        // PTX ends at a zero byte; after a cubin, which knows its length, one does no harm.
        let mut image = image.to_vec();
        image.push(0);
        let mut log = vec![0u8; LOG_BYTES_MAX];
        let mut options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        // The driver takes a number where the option is one, in the pointer's place.
        let room = std::ptr::without_provenance_mut::<c_void>(LOG_BYTES_MAX - 1);
        let mut values = [log.as_mut_ptr().cast::<c_void>(), room];
        let mut raw = std::ptr::null_mut();
        let current = context.enter()?;
        // SAFETY: the image ends in a zero; as many values as options, of the types they ask for, and a log with the room
        // that is claimed; all live until the call returns.
        let result = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut raw,
                image.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        drop(current);
        let inner = match result {
            CUresult::CUDA_SUCCESS => {
                Arc::new(Loaded { raw, shared_bytes_max: device.properties().shared_bytes_max, context })
            }
            CUresult::CUDA_ERROR_INVALID_IMAGE
            | CUresult::CUDA_ERROR_INVALID_PTX
            | CUresult::CUDA_ERROR_INVALID_SOURCE
            | CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
                let log = String::from_utf8_lossy(&log[..end]).into_owned();
                let newer = compiler::newer_than_driver(&image[..image.len() - 1]);
                let described = describe(result);
                let detail = match newer {
                    Some(newer) => format!("{}: {newer}", described.trim_end_matches('.')),
                    None => described,
                };
                return Err(DeviceError::Compile { source_name: name.to_owned(), detail, log });
            }
            other => return Err(failure(other, &format!("loading the kernels of {name}"))),
        };
        Ok(Self { inner })
    }

    /// The kernel of this (`extern "C"`) name.
    ///
    /// # Errors
    /// The image has none.
    pub fn function(&self, name: &str) -> Result<Function, DeviceError> {
        let doing = format!("looking up the kernel {name}");
        let c_name = CString::new(name).map_err(|_| DeviceError::Driver {
            doing: doing.clone(),
            detail: "its name holds a zero byte".to_owned(),
        })?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends in a zero, `raw` is writable.
        self.inner.context.call(&doing, || unsafe {
            sys::cuModuleGetFunction(&raw mut raw, self.inner.raw, c_name.as_ptr())
        })?;
        Ok(Function { raw, name: name.into(), module: Arc::clone(&self.inner) })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded once; no function of it is left. The driver waits for launches that still run.
        self.context.release(|| unsafe { sys::cuModuleUnload(self.raw) });
    }
}

/// A kernel; keeps its module loaded.
#[derive(Debug, Clone)]
pub struct Function {
    raw: CUfunction,
    name: Arc<str>,
    module: Arc<Loaded>,
}

// SAFETY: the driver's functions may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The driver's handle, valid while the function lives.
    pub fn raw(&self) -> CUfunction {
        self.raw
    }

    /// Lets launches use up to `bytes` of dynamic shared memory; up to 48 KiB need no leave.
    ///
    /// # Errors
    /// The card has less.
    pub fn allow_shared_bytes(&self, bytes: u32) -> Result<(), DeviceError> {
        if bytes <= SHARED_BYTES_DEFAULT {
            return Ok(());
        }
        let (name, most) = (&self.name, self.module.shared_bytes_max);
        if bytes > most {
            return Err(DeviceError::Driver {
                doing: format!("preparing the kernel {name}"),
                detail: format!(
                    "it needs {bytes} bytes of shared memory a block, and the card has {most}; use a smaller tile"
                ),
            });
        }
        let bytes = i32::try_from(bytes).expect("no card has 2 GiB of shared memory");
        let what = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function's module is loaded.
        self.module.context.call(&format!("preparing the kernel {name}"), || unsafe {
            sys::cuFuncSetAttribute(self.raw, what, bytes)
        })
    }

    /// Registers that each thread uses, and bytes that it spills to memory.
    ///
    /// # Errors
    /// The driver refused.
    pub fn registers_and_spill_bytes(&self) -> Result<(u32, u32), DeviceError> {
        let read = |what| {
            let mut value = 0;
            // SAFETY: `value` is writable; the function's module is loaded.
            self.module.context.call("asking about a kernel", || unsafe {
                sys::cuFuncGetAttribute(&raw mut value, what, self.raw)
            })?;
            Ok(value.unsigned_abs())
        };
        Ok((
            read(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            read(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        ))
    }

    /// Enqueues the kernel over `grid` blocks of `block` threads, each block with `shared_bytes` of dynamic shared memory.
    /// `args` holds the addresses of the arguments' values, which are copied before this returns.
    ///
    /// # Safety
    /// - `args` has one address per parameter of the kernel, of a value with the parameter's size and meaning;
    /// - the memory that the kernel reaches through them is valid on the device, and until an event recorded later on
    ///   `stream` has fired nobody writes what it reads or touches what it writes without waiting for that event;
    /// - the kernel is right for this `grid`, `block` and `shared_bytes`.
    ///
    /// # Errors
    /// The driver refused the launch, or an earlier asynchronous operation failed.
    ///
    /// # Panics
    /// If `stream` is of another device.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        args: &mut [*mut c_void],
    ) -> Result<(), DeviceError> {
        assert!(stream.is_of(&self.module.context), "kernel {} is loaded on the stream's device", self.name);
        let _current = self.module.context.enter()?;
        // SAFETY: the caller's promises; function and stream are alive and of one context.
        let result = unsafe {
            sys::cuLaunchKernel(
                self.raw,
                grid[0],
                grid[1],
                grid[2],
                block[0],
                block[1],
                block[2],
                shared_bytes,
                stream.raw(),
                args.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        match result {
            CUresult::CUDA_SUCCESS => Ok(()),
            other => Err(failure(
                other,
                &format!(
                    "launching the kernel {} on a grid of {grid:?} blocks of {block:?} threads with {shared_bytes} \
                     bytes of shared memory",
                    self.name
                ),
            )),
        }
    }
}
