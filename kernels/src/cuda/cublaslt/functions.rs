//! The functions of cuBLASLt that products need, of the library that was chosen for the driver.

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t, cublasLtMatmulPreference_t,
    cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cublasStatus_t, cudaDataType, cudaStream_t,
};
use std::ffi::{c_int, c_void};
use terrace_device::cuda::Library;

terrace_device::library_functions! {
    Library::CublasLt;
    fn cublasLtCreate(handle: *mut cublasLtHandle_t) -> cublasStatus_t;
    fn cublasLtDestroy(handle: cublasLtHandle_t) -> cublasStatus_t;
    fn cublasLtMatmul(
        handle: cublasLtHandle_t,
        description: cublasLtMatmulDesc_t,
        alpha: *const c_void,
        a: *const c_void,
        a_layout: cublasLtMatrixLayout_t,
        b: *const c_void,
        b_layout: cublasLtMatrixLayout_t,
        beta: *const c_void,
        c: *const c_void,
        c_layout: cublasLtMatrixLayout_t,
        d: *mut c_void,
        d_layout: cublasLtMatrixLayout_t,
        algorithm: *const cublasLtMatmulAlgo_t,
        workspace: *mut c_void,
        workspace_bytes: usize,
        stream: cudaStream_t,
    ) -> cublasStatus_t;
    fn cublasLtMatmulDescCreate(
        description: *mut cublasLtMatmulDesc_t,
        compute: cublasComputeType_t,
        scale: cudaDataType,
    ) -> cublasStatus_t;
    fn cublasLtMatmulDescDestroy(description: cublasLtMatmulDesc_t) -> cublasStatus_t;
    fn cublasLtMatmulDescSetAttribute(
        description: cublasLtMatmulDesc_t,
        which: cublasLtMatmulDescAttributes_t,
        value: *const c_void,
        bytes: usize,
    ) -> cublasStatus_t;
    fn cublasLtMatrixLayoutCreate(
        layout: *mut cublasLtMatrixLayout_t,
        data: cudaDataType,
        rows: u64,
        columns: u64,
        stride: i64,
    ) -> cublasStatus_t;
    fn cublasLtMatrixLayoutDestroy(layout: cublasLtMatrixLayout_t) -> cublasStatus_t;
    fn cublasLtMatmulPreferenceCreate(wishes: *mut cublasLtMatmulPreference_t) -> cublasStatus_t;
    fn cublasLtMatmulPreferenceDestroy(wishes: cublasLtMatmulPreference_t) -> cublasStatus_t;
    fn cublasLtMatmulPreferenceSetAttribute(
        wishes: cublasLtMatmulPreference_t,
        which: cublasLtMatmulPreferenceAttributes_t,
        value: *const c_void,
        bytes: usize,
    ) -> cublasStatus_t;
    fn cublasLtMatmulAlgoGetHeuristic(
        handle: cublasLtHandle_t,
        description: cublasLtMatmulDesc_t,
        a: cublasLtMatrixLayout_t,
        b: cublasLtMatrixLayout_t,
        c: cublasLtMatrixLayout_t,
        d: cublasLtMatrixLayout_t,
        wishes: cublasLtMatmulPreference_t,
        room: c_int,
        results: *mut cublasLtMatmulHeuristicResult_t,
        count: *mut c_int,
    ) -> cublasStatus_t;
}
