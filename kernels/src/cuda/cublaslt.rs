//! Products by cuBLASLt, which is loaded at run time where it is found.
//!
//! cuBLASLt is column-major: `out[M,N] = op(a)·op(b)` row by row is `outᵀ = op(b)ᵀ·op(a)ᵀ` column by column, so b goes
//! first and no operand is moved. Sums are f32 (no TF32). Which of its kernels computes a product is asked once for a
//! [`Case`] and kept, so the same shapes always get the same bits; kernels that would add partial sums rounded to the
//! result's dtype are left out. A residual goes in as the library's C, a bias as its epilogue, which is added after C.
//! Results of 16 bits are rounded once, but for two cases in which the library (13.1 on Hopper) rounds before it adds, as trainers that
//! add in an operation of its own do: a residual in the place of the result, and a bias where rows are no multiple of 16 bytes. Since
//! where a residual lies must not change bits, it is always in the result's place (`matmul.rs`).
//! The alignment of the operands is part of a case: it follows from the layout of a group's weights, not from where the group
//! lies, since regions of memory begin at multiples of 256. So are the sizes: the bits of a row may depend on how many rows
//! there are. They may differ between versions of the library and between cards, too.

mod functions;

use super::failed;
use super::matmul::Product;
use crate::{DType, Result, View};
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtEpilogue_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t as Preference, cublasLtMatrixLayout_t,
    cublasStatus_t, cudaDataType,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use terrace_device::cuda::{CudaDevice, CudaStream, Library};
use terrace_device::{Bytes, DeviceError};

/// What NVIDIA recommends for Hopper and later; less would shut out fast kernels.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// `CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE`: parts of a sum are added in f32, in the workspace.
const ADD_IN_COMPUTE_TYPE: u32 = 2;

/// Prompts of ever other lengths are ever other cases, of about a kilobyte each: with this many all are looked for again.
const PLANS_MAX: usize = 4096;

/// The library's handle and what was found for each case.
#[derive(Debug)]
pub(super) struct Products {
    handle: Handle,
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
    /// Locked from the look for a plan until its product is enqueued: the description says where the bias lies, and kernels of one
    /// product hand parts of sums to each other in the workspace, so that none of another may come between them in the stream.
    plans: Mutex<HashMap<Case, Option<Plan>>>,
}

/// All that decides which kernel computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Case {
    dims: (usize, usize, usize),
    trans: (bool, bool),
    operands: DType,
    out: DType,
    /// Of b, a and out: bytes, 16 at most.
    alignments: [u32; 3],
    /// Of the bias, if there is one.
    bias: Option<u32>,
}

impl Products {
    /// `None` if the library is not found, or, with a warning of the device's, if it does not start.
    pub(super) fn new(
        device: &Arc<CudaDevice>,
        stream: &Arc<CudaStream>,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(path) = &Library::CublasLt.open().found else { return Ok(None) };
        let _current = device.enter()?;
        let handle = match Handle::new() {
            Ok(handle) => handle,
            Err(why) => {
                device.warn(format!(
                    "{} {why}, so Terrace's own kernels compute products, more slowly; a cuBLASLt of the driver's CUDA or older, \
                     first on LD_LIBRARY_PATH, is used",
                    path.display()
                ));
                return Ok(None);
            }
        };
        let (device, stream) = (Arc::clone(device), Arc::clone(stream));
        Ok(Some(Self { handle, device, stream, plans: Mutex::default() }))
    }

    /// Enqueues the product; `false` if the library has no kernel for it.
    pub(super) fn run(&self, product: &Product<'_>, workspace: Bytes<'_>) -> Result<bool> {
        const OP: &str = "matmul";
        let Some(case) = Case::of(product) else { return Ok(false) };
        let _current = self.device.enter().map_err(|error| failed(OP, &error))?;
        let bias = product.bias.map(|bias| pointer(bias.bytes()));
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        if plans.len() >= PLANS_MAX && !plans.contains_key(&case) {
            plans.clear();
        }
        let plan = match plans.entry(case) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => {
                let plan = Plan::find(&self.handle, case, bias).map_err(|error| failed(OP, &error))?;
                place.insert(plan)
            }
        };
        let Some(Plan { description, a, b, out, algorithm }) = plan else { return Ok(false) };
        let alpha = 1.0f32;
        let beta = if product.residual.is_some() { 1.0f32 } else { 0.0 };
        assert!(workspace.len() >= WORKSPACE_BYTES, "the workspace was planned");
        let in_place = |residual: View<'_>| pointer(residual.bytes()) == pointer(product.out.bytes());
        assert!(product.residual.is_none_or(in_place), "a residual is in the result's place");
        if let Some(bias) = bias {
            description.bias(bias).map_err(|error| failed(OP, &error))?;
        }
        // SAFETY: handle, descriptions and algorithm are alive and of this case; operands have the sizes that the
        // descriptions give, which `check` compared; one stream uses the workspace. The numbers and the address of the bias
        // stay until the call returns, which is when the library has read them.
        let status = unsafe {
            functions::cublasLtMatmul(
                self.handle.0,
                description.0,
                (&raw const alpha).cast(),
                pointer(product.b.bytes()),
                b.0,
                pointer(product.a.bytes()),
                a.0,
                (&raw const beta).cast(),
                pointer(product.out.bytes()),
                out.0,
                pointer(product.out.bytes()),
                out.0,
                std::ptr::from_ref(algorithm),
                pointer(workspace),
                WORKSPACE_BYTES,
                self.stream.raw().cast(),
            )
        };
        if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED {
            // What it had found does not run after all.
            plans.insert(case, None);
            return Ok(false);
        }
        check(status, "enqueueing a product").map_err(|error| failed(OP, &error))?;
        Ok(true)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // The library frees memory of the device; without a context it would make one, on another device perhaps.
        let _current = self.device.enter();
        // SAFETY: made once; no call with it is running.
        let _ = unsafe { functions::cublasLtDestroy(self.handle.0) };
    }
}

impl Case {
    /// `None` for dtypes that the library does not mix.
    fn of(product: &Product<'_>) -> Option<Self> {
        let &Product { a, b, out, spec, dims, bias, residual } = product;
        let mixes = a.dtype() == b.dtype() && (out.dtype() == a.dtype() || out.dtype() == DType::F32);
        let added_like_out = bias.into_iter().chain(residual).all(|added| added.dtype() == out.dtype());
        let alignment = |view: View<'_>| 1 << (pointer(view.bytes()) as usize).trailing_zeros().min(4);
        (mixes && added_like_out).then(|| Self {
            dims: (dims.m, dims.n, dims.l),
            trans: (spec.trans_a, spec.trans_b),
            operands: a.dtype(),
            out: out.dtype(),
            alignments: [b, a, out].map(alignment),
            bias: bias.map(alignment),
        })
    }
}

fn pointer(bytes: Bytes<'_>) -> *mut c_void {
    bytes.address().as_ptr().cast()
}

/// How to compute the products of one case.
#[derive(Debug)]
struct Plan {
    description: Description,
    a: Layout,
    b: Layout,
    out: Layout,
    algorithm: cublasLtMatmulAlgo_t,
}

// SAFETY: the library's descriptions are plain memory, used from one thread at a time (`Products::plans`).
unsafe impl Send for Plan {}

impl Plan {
    /// `None` if the library has no kernel for the case.
    fn find(handle: &Handle, case: Case, bias: Option<*mut c_void>) -> Result<Option<Self>, DeviceError> {
        let (m, n, l) = case.dims;
        let description = Description::new()?;
        description.transpose(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, case.trans.1)?;
        description.transpose(DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, case.trans.0)?;
        if let Some(bias) = bias {
            description.with_bias()?;
            // Some versions of the library look for kernels only once they know an address.
            description.bias(bias)?;
        }
        // Rows and columns as they lie in memory, column-major.
        let stored =
            |across: usize, down: usize, flip: bool| if flip { (down, across) } else { (across, down) };
        let b = Layout::new(case.operands, stored(n, l, case.trans.1))?;
        let a = Layout::new(case.operands, stored(l, m, case.trans.0))?;
        let out = Layout::new(case.out, (n, m))?;
        let wishes = Wishes::new()?;
        wishes.set(Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &(WORKSPACE_BYTES as u64))?;
        wishes.set(Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &ADD_IN_COMPUTE_TYPE)?;
        let [of_b, of_a, of_out] = case.alignments;
        // There is no wish for the bias, which is read as the result is written.
        let of_out = case.bias.map_or(of_out, |of_bias| of_bias.min(of_out));
        wishes.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &of_b)?;
        wishes.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &of_a)?;
        wishes.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &of_out)?;
        wishes.set(Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &of_out)?;
        // SAFETY: plain numbers, for which zero is a value.
        let mut best: cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut found = 0;
        // SAFETY: all descriptions are alive; there is room for the one result that is asked for.
        let status = unsafe {
            functions::cublasLtMatmulAlgoGetHeuristic(
                handle.0,
                description.0,
                b.0,
                a.0,
                out.0,
                out.0,
                wishes.0,
                1,
                &raw mut best,
                &raw mut found,
            )
        };
        if status == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED || status as u32 == 0 && found == 0 {
            return Ok(None);
        }
        check(status, "choosing a kernel for a product")?;
        Ok(Some(Self { description, a, b, out, algorithm: best.algo }))
    }
}

#[derive(Debug)]
struct Handle(cublasLtHandle_t);

// SAFETY: the library's handle may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; calls do not change what it points to but under locks of the library's own.
unsafe impl Sync for Handle {}

impl Handle {
    /// The library was found, and the device's context is current. Says why it cannot be used, if so.
    fn new() -> Result<Self, String> {
        let missing = functions::missing();
        if !missing.is_empty() {
            return Err(format!("is too old: it lacks {}", missing.join(", ")));
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library has the function; `raw` is writable.
        match unsafe { functions::cublasLtCreate(&raw mut raw) } {
            cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(Self(raw)),
            other => Err(format!("does not start ({other:?})")),
        }
    }
}

/// What is to be computed: f32 sums, which operand is transposed, and whether and where there is a bias.
#[derive(Debug)]
struct Description(cublasLtMatmulDesc_t);

impl Description {
    fn new() -> Result<Self, DeviceError> {
        let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F);
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is writable.
        let status = unsafe { functions::cublasLtMatmulDescCreate(&raw mut raw, compute, scale) };
        check(status, "describing a product")?;
        Ok(Self(raw))
    }

    fn transpose(&self, which: DescAttribute, transpose: bool) -> Result<(), DeviceError> {
        // CUBLAS_OP_T and CUBLAS_OP_N, which the bindings leave to another library's header.
        self.set(which, &u32::from(transpose))
    }

    /// A bias for every row of the column-major result, of its dtype.
    fn with_bias(&self) -> Result<(), DeviceError> {
        let epilogue = cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS as u32;
        self.set(DescAttribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)
    }

    /// Where it lies.
    fn bias(&self, at: *mut c_void) -> Result<(), DeviceError> {
        self.set(DescAttribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &at)
    }

    fn set<T: Copy>(&self, which: DescAttribute, value: &T) -> Result<(), DeviceError> {
        let at = std::ptr::from_ref(value).cast();
        // SAFETY: the description is alive; the value has the size of the attribute's type, which callers know.
        let status =
            unsafe { functions::cublasLtMatmulDescSetAttribute(self.0, which, at, std::mem::size_of::<T>()) };
        check(status, "describing a product")
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        // SAFETY: made once.
        let _ = unsafe { functions::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// A dense column-major matrix.
#[derive(Debug)]
struct Layout(cublasLtMatrixLayout_t);

impl Layout {
    fn new(dtype: DType, (rows, columns): (usize, usize)) -> Result<Self, DeviceError> {
        let data = match dtype {
            DType::F32 => cudaDataType::CUDA_R_32F,
            DType::BF16 => cudaDataType::CUDA_R_16BF,
            DType::F16 => cudaDataType::CUDA_R_16F,
            DType::F64 | DType::I32 => unreachable!("products are of floats"),
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is writable.
        let status = unsafe {
            functions::cublasLtMatrixLayoutCreate(
                &raw mut raw,
                data,
                rows as u64,
                columns as u64,
                rows as i64,
            )
        };
        check(status, "describing a matrix")?;
        Ok(Self(raw))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made once.
        let _ = unsafe { functions::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// What a kernel must respect.
#[derive(Debug)]
struct Wishes(cublasLtMatmulPreference_t);

impl Wishes {
    fn new() -> Result<Self, DeviceError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `raw` is writable.
        check(unsafe { functions::cublasLtMatmulPreferenceCreate(&raw mut raw) }, "describing a product")?;
        Ok(Self(raw))
    }

    fn set<T: Copy>(&self, which: Preference, value: &T) -> Result<(), DeviceError> {
        let at = std::ptr::from_ref(value).cast();
        // SAFETY: the preferences are alive; the value has the size of the attribute's type, which callers know.
        let status = unsafe {
            functions::cublasLtMatmulPreferenceSetAttribute(self.0, which, at, std::mem::size_of::<T>())
        };
        check(status, "describing a product")
    }
}

impl Drop for Wishes {
    fn drop(&mut self) {
        // SAFETY: made once.
        let _ = unsafe { functions::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

fn check(status: cublasStatus_t, doing: &str) -> Result<(), DeviceError> {
    match status {
        cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        other => Err(DeviceError::Driver { doing: doing.to_owned(), detail: format!("cuBLASLt: {other:?}") }),
    }
}
