//! The C API as a Rust test uses it: owned buffers, zeroed params, errors as strings. Nothing here decides; every call goes through the exports.

#![allow(dead_code, reason = "each test uses its part")]

use pagedkv::abi::batch::pkv_batch;
use pagedkv::abi::collection::*;
use pagedkv::abi::context::*;
use pagedkv::abi::status::{PKV_OK, pkv_error, pkv_status};
use pagedkv::abi::types::*;
use pagedkv::abi::version::PKV_ABI_VERSION;
use pagedkv::dtype::DType;
use std::ffi::CStr;
use std::ptr::{null, null_mut};

pub fn zeroed<T>() -> T {
    // SAFETY: only used for C structs of integers, floats and pointers.
    unsafe { std::mem::zeroed() }
}

pub fn new_error() -> pkv_error {
    pkv_error { struct_size: size_of::<pkv_error>(), ..zeroed() }
}

pub fn text(c: &[std::ffi::c_char]) -> String {
    // SAFETY: the library ends its texts with a NUL.
    unsafe { CStr::from_ptr(c.as_ptr()) }.to_str().unwrap().to_string()
}

/// Run a call; on failure its status, argument and message.
pub fn call(f: impl FnOnce(*mut pkv_error) -> pkv_status) -> Result<(), (pkv_status, String, String)> {
    let mut err = new_error();
    match f(&mut err) {
        PKV_OK => Ok(()),
        status => {
            assert_eq!(status, err.status);
            Err((status, text(&err.argument), text(&err.message)))
        }
    }
}

/// Run a call that must succeed.
pub fn ok(f: impl FnOnce(*mut pkv_error) -> pkv_status) {
    if let Err((status, argument, message)) = call(f) {
        panic!("status {status}: {argument}: {message}");
    }
}

/// Set to `cuda`, contexts are CUDA contexts: for the emulation, where host memory is as good as device memory.
pub const BACKEND: &str = "PAGEDKV_TEST_BACKEND";

pub struct Context(pub *mut pkv_context);
// SAFETY: the header lets any thread use a context.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn new(num_threads: u32) -> Self {
        Self::with(|o| o.num_threads = num_threads)
    }

    pub fn with(change: impl FnOnce(&mut pkv_context_options)) -> Self {
        let mut options = pkv_context_options {
            struct_size: size_of::<pkv_context_options>(),
            abi_version: PKV_ABI_VERSION,
            ..zeroed()
        };
        if std::env::var_os(BACKEND).is_some_and(|v| v == "cuda") {
            options.backend = PKV_BACKEND_CUDA;
        }
        change(&mut options);
        let mut out = null_mut();
        // SAFETY: live structs.
        ok(|e| unsafe { pkv_context_create(&options, &mut out, e) });
        Context(out)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by pkv_context_create, destroyed once.
        unsafe { pkv_context_destroy(self.0) }
    }
}

pub struct Collection(pub *mut pkv_collection);
// SAFETY: the header lets any thread use a collection.
unsafe impl Send for Collection {}
// SAFETY: as above.
unsafe impl Sync for Collection {}

impl Collection {
    pub fn new(ctx: &Context, options: &pkv_collection_options) -> Self {
        let mut out = null_mut();
        // SAFETY: live structs.
        ok(|e| unsafe { pkv_collection_create(ctx.0, options, &mut out, e) });
        Collection(out)
    }
}

impl Drop for Collection {
    fn drop(&mut self) {
        // SAFETY: made by pkv_collection_create, destroyed once.
        unsafe { pkv_collection_destroy(self.0) }
    }
}

/// Owned memory, 16-byte aligned, with a dtype and a shape.
#[derive(Clone)]
pub struct Tensor {
    words: Vec<u128>,
    pub bytes: usize,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl Tensor {
    pub fn new(dtype: DType, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Tensor { words: vec![0; bytes.div_ceil(16)], bytes, dtype, shape: shape.to_vec() }
    }

    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: &[u8]) -> Self {
        let mut out = Self::new(dtype, shape);
        out.bytes_mut().copy_from_slice(bytes);
        out
    }

    /// Rounded to `dtype`.
    pub fn from_f32(dtype: DType, shape: &[usize], x: &[f32]) -> Self {
        use pagedkv::dtype::{E4m3, E5m2, E8m0, Element, bf16, f16};
        let bytes: Vec<u8> = x
            .iter()
            .flat_map(|&x| match dtype {
                DType::F32 => x.to_le_bytes().to_vec(),
                DType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
                DType::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
                DType::F8E4M3 => vec![E4m3::from_f32(x).0],
                DType::F8E5M2 => vec![E5m2::from_f32(x).0],
                DType::F8E8M0 => vec![E8m0::from_f32(x).0],
                d => panic!("no float {d:?}"),
            })
            .collect();
        Self::from_bytes(dtype, shape, &bytes)
    }

    pub fn to_f32(&self) -> Vec<f32> {
        use pagedkv::dtype::{E4m3, E5m2, E8m0, Element, bf16, f16};
        self.bytes()
            .chunks_exact(self.dtype.size())
            .map(|b| match self.dtype {
                DType::F32 => f32::from_le_bytes(b.try_into().unwrap()),
                DType::F16 => f16::from_le_bytes(b.try_into().unwrap()).to_f32(),
                DType::BF16 => bf16::from_le_bytes(b.try_into().unwrap()).to_f32(),
                DType::F8E4M3 => E4m3(b[0]).to_f32(),
                DType::F8E5M2 => E5m2(b[0]).to_f32(),
                DType::F8E8M0 => E8m0(b[0]).to_f32(),
                DType::I32 => i32::from_le_bytes(b.try_into().unwrap()) as f32,
                d => panic!("no number {d:?}"),
            })
            .collect()
    }

    pub fn to_u32(&self) -> Vec<u32> {
        self.bytes().chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the words are initialised and `bytes` long.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr().cast(), self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and exclusively borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.bytes) }
    }

    pub fn buffer(&self) -> pkv_buffer {
        pkv_buffer { data: self.words.as_ptr().cast_mut().cast(), size: self.bytes }
    }

    /// Contiguous, as the C API sees it. The library may write through it: keep no slice of it alive across a call.
    pub fn abi(&self) -> pkv_tensor {
        let mut t: pkv_tensor = zeroed();
        t.data = self.words.as_ptr().cast_mut().cast();
        t.dtype = self.dtype as i32;
        t.ndim = self.shape.len() as i32;
        t.shape.iter_mut().zip(&self.shape).for_each(|(to, &n)| *to = n as i64);
        t
    }
}

/// Owned arrays of a batch.
#[derive(Clone, Default)]
pub struct Batch {
    pub row_offsets: Vec<u32>,
    pub cache_lengths: Vec<u32>,
    pub table: Vec<u32>,
    pub max_pages: u32,
}

impl Batch {
    /// Sequences of (cached, new) tokens over blocks of `page_size`, handed out in the order `blocks` gives them.
    pub fn new(sequences: &[(u32, u32)], page_size: u32, mut blocks: impl FnMut() -> u32) -> Self {
        let pages = |&(cached, new): &(u32, u32)| (cached + new).div_ceil(page_size);
        let max_pages = sequences.iter().map(pages).max().unwrap_or(0);
        let mut out = Batch { row_offsets: vec![0], max_pages, ..Batch::default() };
        for s in sequences {
            out.row_offsets.push(out.row_offsets.last().unwrap() + s.1);
            out.cache_lengths.push(s.0);
            // Entries past a sequence's pages are never read.
            out.table.extend((0..max_pages).map(|p| if p < pages(s) { blocks() } else { u32::MAX }));
        }
        out
    }

    pub fn tokens(&self) -> usize {
        *self.row_offsets.last().unwrap() as usize
    }

    pub fn abi(&self) -> pkv_batch {
        pkv_batch {
            struct_size: size_of::<pkv_batch>(),
            input_row_offsets: self.row_offsets.as_ptr(),
            cache_lengths: self.cache_lengths.as_ptr(),
            lookup_table: if self.table.is_empty() { null() } else { self.table.as_ptr() },
            lookup_table_stride: 0,
            batch_size: self.cache_lengths.len() as u32,
            max_pages: self.max_pages,
            max_seq_length: self.row_offsets.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0),
            max_cache_length: self.cache_lengths.iter().copied().max().unwrap_or(0),
        }
    }

    /// (sequence, position) of a row.
    pub fn position(&self, t: usize) -> (usize, usize) {
        let b = self.row_offsets.partition_point(|&o| o as usize <= t) - 1;
        (b, self.cache_lengths[b] as usize + t - self.row_offsets[b] as usize)
    }

    /// (block, slot) of a position.
    pub fn locate(&self, b: usize, p: usize, page_size: usize) -> (usize, usize) {
        (self.table[b * self.max_pages as usize + p / page_size] as usize, p % page_size)
    }
}

/// The two functions of a kernel.
pub struct Kernel<P> {
    pub size: unsafe extern "C" fn(*const pkv_context, *const P, *mut usize, *mut pkv_error) -> pkv_status,
    pub run: unsafe extern "C" fn(*const pkv_context, pkv_stream, *const P, pkv_buffer, *mut pkv_error) -> pkv_status,
}

impl<P> Kernel<P> {
    /// With the library's own scratch, or with a dirty workspace of exactly the size asked for and a canary behind it.
    pub fn call(&self, ctx: &Context, params: &P, given: bool) -> Result<(), (pkv_status, String, String)> {
        let stream = pkv_stream { native: null_mut() };
        let none = pkv_buffer { data: null_mut(), size: 0 };
        if !given {
            // SAFETY: params hold live pointers, by the test.
            return call(|e| unsafe { (self.run)(ctx.0, stream, params, none, e) });
        }
        let mut bytes = 0;
        // SAFETY: as above.
        call(|e| unsafe { (self.size)(ctx.0, params, &mut bytes, e) })?;
        let mut memory = vec![0xABu8; bytes + 512];
        let start = memory.as_ptr().align_offset(256);
        let workspace = pkv_buffer { data: memory[start..].as_mut_ptr().cast(), size: bytes };
        let result = if bytes == 0 {
            // SAFETY: as above.
            call(|e| unsafe { (self.run)(ctx.0, stream, params, none, e) })
        } else {
            // SAFETY: as above.
            call(|e| unsafe { (self.run)(ctx.0, stream, params, workspace, e) })
        };
        assert!(memory[start + bytes..].iter().all(|&b| b == 0xAB), "the workspace was overrun");
        result
    }

    pub fn ok(&self, ctx: &Context, params: &P, given: bool) {
        if let Err((status, argument, message)) = self.call(ctx, params, given) {
            panic!("status {status}: {argument}: {message}");
        }
    }
}

macro_rules! kernels {
    ($($name:ident: $module:ident, $params:ident, $size:ident, $run:ident;)*) => { $(
        pub const $name: Kernel<pagedkv::abi::$module::$params> =
            Kernel { size: pagedkv::abi::$module::$size, run: pagedkv::abi::$module::$run };
    )* };
}

kernels! {
    KV_STORE: kv, pkv_kv_store_params, pkv_kv_store_workspace_size, pkv_kv_store;
    KV_GATHER: kv, pkv_kv_gather_params, pkv_kv_gather_workspace_size, pkv_kv_gather;
    QKV: qkv, pkv_qkv_matmul_gguf_params, pkv_qkv_matmul_gguf_workspace_size, pkv_qkv_matmul_gguf;
    ROPE: rope, pkv_mla_rope_rmsnorm_quantize_params, pkv_mla_rope_rmsnorm_quantize_workspace_size, pkv_mla_rope_rmsnorm_quantize;
    PREFILL: prefill, pkv_mla_prefill_fp8_params, pkv_mla_prefill_fp8_workspace_size, pkv_mla_prefill_fp8;
    INDEXER: indexer, pkv_mla_indexer_fp8_params, pkv_mla_indexer_fp8_workspace_size, pkv_mla_indexer_fp8;
    MERGE: merge, pkv_merge_attention_params, pkv_merge_attention_workspace_size, pkv_merge_attention;
}

/// ‖a − b‖ / ‖b‖ over finite elements; infinities and NaN must sit where `b` has them.
pub fn relative_error(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let (mut error, mut norm) = (0.0, 0.0);
    for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
        if !b.is_finite() || !a.is_finite() {
            assert!(a == b || (a.is_nan() && b.is_nan()), "element {i} is {a}, must be {b}");
            continue;
        }
        error += (a as f64 - b as f64).powi(2);
        norm += (b as f64).powi(2);
    }
    if norm == 0.0 { error.sqrt() } else { (error / norm).sqrt() }
}
