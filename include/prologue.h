// pagedkv: a paged KV-cache collection and the attention-side kernels of an LLM inference engine, on CPU and CUDA.
//
// Generated from src/abi by ctests/rust/header.rs.
//
// An engine makes, once: a context (pkv_context_create), a collection (pkv_collection_create), its weights (pkv_gguf_weight_create). Then, every step and
// layer, it calls kernels with a pkv_batch that says which rows are whose and where their pages lie. ctests/examples has complete programs.
//
// Conventions
//
//   Results      A function that can fail returns pkv_status. Outputs are written only on PKV_OK; a refused call changes nothing: not the cache, not the
//                output, not the workspace. Exceptions: pkv_error is filled on failure and cleared on PKV_OK, but not touched where its struct_size is
//                0 or less than 512; PKV_ERR_DEVICE and PKV_ERR_INTERNAL leave undefined what the call writes, the cache and an input in place included.
//                The library never aborts, exits or prints; a panic inside comes back as PKV_ERR_INTERNAL, its text in the error and the log.
//   Arguments    In this order: handle, stream, params, workspace, outputs, error. Zero is the default of every field.
//   struct_size  Comes first and is the caller's sizeof. Structs grow only at the end: a shorter struct is read as if zero followed; a longer one is
//                accepted if what the library does not know is all zero (PKV_ERR_ABI else). No struct has padding; 64-bit targets only.
//   Tensors      Strides count elements, sizes count bytes, all offsets are 64-bit. All strides zero = contiguous row-major; otherwise the last one
//                is 1 (for an extent above 1) and the others are >= 0; outputs must not overlap themselves. Every tensor may be strided in its outer
//                dimensions. Aliasing is allowed only where a comment says so. An absent optional tensor has data NULL and dtype PKV_DTYPE_NONE.
//                A tensor with 0 elements may have data NULL. shape[0] of a ragged tensor may be larger than the batch's number of new tokens T
//                (padded buffers): rows past T are neither read nor written.
//   Alignment    An element's natural one on CPU, 16 bytes on CUDA, 256 for a workspace; GGUF data any.
//   Memory       Pointers in params live on the context's device: host memory for a CPU context, device memory for CUDA; scalars are host values. The
//                library borrows them for the call (CPU) or until the work on the stream is done (CUDA).
//   Workspace    Each kernel has a query, pkv_X_workspace_size, that looks only at shapes, dtypes, handles and the batch's scalars (data and array
//                pointers may still be NULL), so it also answers "is this supported here?". The size does not shrink when a dimension grows. With
//                workspace {NULL, 0} the library takes what it needs for this call alone (stream-ordered on CUDA) and gives it back.
//   Threads      A const handle may be used by many threads at once; only destroy takes a non-const one. A context outlives what was made with it, and
//                handles of one context are not used with another (PKV_ERR_VALUE). No thread-local state.
//   Streams      On a CPU context the stream must be {NULL}. CUDA kernels do not synchronise, do not allocate when a workspace is given, leave the
//                current device unchanged and can be captured in a CUDA graph; CUDA work is never silently done on the CPU.
//   Device data  On a CUDA context the contents of device arrays cannot be read by the host: the kernels themselves skip a store through a bad block id
//                and never read or write outside the collection. On CPU such a batch is refused.
//   Bits         A row of a result does not depend on thread count, workspace, or the other rows of the batch: the same bits every time.

#ifndef PAGEDKV_H
#define PAGEDKV_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
