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

// ---- Versions ------------------------------------------------------------------------------------------------------------------------------------

#define PKV_VERSION_MAJOR 0
#define PKV_VERSION_MINOR 1
#define PKV_VERSION_PATCH 0
// Goes into pkv_context_options.abi_version; changes only when old callers would break.
#define PKV_ABI_VERSION 1

// PKV_ABI_VERSION of the library that was loaded.
uint32_t pkv_abi_version(void);

// Version of the library that was loaded, "0.1.0". Never NULL, never freed.
const char *pkv_version(void);

// One line for bug reports: version, git commit, CPU kernels chosen, CUDA archs built. Never NULL, never freed.
const char *pkv_build_info(void);

// ---- Status and errors ---------------------------------------------------------------------------------------------------------------------------

#define PKV_OK 0
// A needed pointer or handle is NULL.
#define PKV_ERR_NULL 100
// A number that does not exist or is out of range; a handle of another context.
#define PKV_ERR_VALUE 101
// Rank, extents, strides, sizes, or products that overflow.
#define PKV_ERR_SHAPE 102
// A dtype that is not allowed there.
#define PKV_ERR_DTYPE 103
// A pointer that is not aligned as stated.
#define PKV_ERR_ALIGNMENT 104
// A workspace that was given but is too small.
#define PKV_ERR_WORKSPACE 105
// A block id that does not exist, too few columns, or two new tokens in one slot.
#define PKV_ERR_PAGE_TABLE 106
// struct_size, abi_version, or unknown fields that are set.
#define PKV_ERR_ABI 107
// Known, but not built or not possible on this device.
#define PKV_ERR_UNSUPPORTED 200
// No driver or no such device.
#define PKV_ERR_NO_DEVICE 201
#define PKV_ERR_NO_MEMORY 202
// The driver reported an error; pkv_error.native_code has its number. It may stem from earlier asynchronous work.
#define PKV_ERR_DEVICE 203
// A fault of this library.
#define PKV_ERR_INTERNAL 300

// What became of a call. 0 is success; 1xx: fix the call; 2xx: change machine or options; 3xx: report it to us.
typedef int32_t pkv_status;

// What went wrong, for people. The caller's memory; NULL is allowed wherever one is taken. Filled on failure, cleared on PKV_OK,
// not touched where struct_size is 0 or too small. Texts end with a NUL and are cut to fit.
typedef struct pkv_error {
    // sizeof(pkv_error)
    size_t struct_size;
    pkv_status status;
    // The driver's own code (CUresult) where there is one, else 0.
    int32_t native_code;
    // The argument at fault, as the caller wrote it: "params.q.shape[1]".
    char argument[48];
    // What was wrong and what was expected; for PKV_ERR_UNSUPPORTED why each implementation refused.
    char message[448];
} pkv_error;

// The name of a status, "PKV_ERR_SHAPE"; "PKV_ERR_UNKNOWN" for a number that is none. Never NULL, never freed.
const char *pkv_status_name(pkv_status status);

// ---- Buffers, streams, tensors -------------------------------------------------------------------------------------------------------------------

// No dtype: the tensor or the scales are absent.
#define PKV_DTYPE_NONE 0
#define PKV_F32 1
// IEEE half precision.
#define PKV_F16 2
#define PKV_BF16 3
// e4m3fn of OCP OFP8: finite up to 448, no infinities.
#define PKV_F8_E4M3 4
// e5m2 of OCP OFP8: finite up to 57344.
#define PKV_F8_E5M2 5
// Powers of two of OCP MX; scales only.
#define PKV_F8_E8M0 6
#define PKV_U8 7
#define PKV_I8 8
#define PKV_U32 9
#define PKV_I32 10
#define PKV_I64 11

// Memory by address and size in bytes.
typedef struct pkv_buffer {
    void *data;
    size_t size;
} pkv_buffer;

// A CUstream (= cudaStream_t); {NULL} on a CPU context, or for the default stream.
typedef struct pkv_stream {
    void *native;
} pkv_stream;

// A borrowed view of memory on the context's device. Strides count elements; all zero means contiguous row-major, otherwise the
// last one is 1 and the others are >= 0. Absent: data NULL and dtype PKV_DTYPE_NONE.
typedef struct pkv_tensor {
    void *data;
    int32_t dtype;
    int32_t ndim;
    int64_t shape[4];
    int64_t stride[4];
} pkv_tensor;

// ---- Context -------------------------------------------------------------------------------------------------------------------------------------

#define PKV_BACKEND_CPU 0
#define PKV_BACKEND_CUDA 1
#define PKV_LOG_OFF 0
#define PKV_LOG_ERROR 1
#define PKV_LOG_WARN 2
#define PKV_LOG_INFO 3
#define PKV_LOG_DEBUG 4

// A device and the threads that work for it. Freed by pkv_context_destroy; outlives everything made with it. Any number of threads may use it at once.
typedef struct pkv_context pkv_context;

// Where log lines go: `target` is the module, both texts end with a NUL and live only during the call. May be called from any thread, also several at
// once; must not call back into the library.
typedef void (*pkv_log_fn)(void *user, int32_t level, const char *target, const char *message);

// A piece of work, made by the library for pkv_parallel_for_fn.
typedef void (*pkv_task_fn)(void *task, uint32_t index);

// The engine's own threads: call run(task, i) for each i < count exactly once, on any threads, and return when all are done. It may be called from
// several threads at once, never from inside a task; it may run serially.
typedef void (*pkv_parallel_for_fn)(void *user, uint32_t count, pkv_task_fn run, void *task);

// How a context works; all zero but struct_size and abi_version: CPU, own threads, no log.
typedef struct pkv_context_options {
    // sizeof(pkv_context_options)
    size_t struct_size;
    // PKV_ABI_VERSION; 0 is refused.
    uint32_t abi_version;
    // PKV_BACKEND_CPU or PKV_BACKEND_CUDA.
    int32_t backend;
    // CUDA device ordinal; 0 on CPU.
    int32_t device;
    // PKV_LOG_OFF .. PKV_LOG_DEBUG: lines above this level are not made.
    int32_t log_level;
    // NULL: nothing is logged.
    pkv_log_fn log;
    void *log_user;
    // NULL: the library's own pool, which sleeps when idle. Called only with num_threads above 1.
    pkv_parallel_for_fn parallel_for;
    void *parallel_user;
    // At most 1024. 0: the cores this process may use (affinity, cgroup quota). With parallel_for: how many threads the engine gives, 1 if 0.
    uint32_t num_threads;
    uint32_t reserved;
} pkv_context_options;

// Make a context. options NULL: all defaults.
//
// The environment variable PAGEDKV_CPU_ISA (reference, scalar, avx2, avx512) holds the CPU kernels to a lower instruction set than the machine has, for tests.
pkv_status pkv_context_create(const struct pkv_context_options *options,
                              struct pkv_context **out,
                              pkv_error *err);

// Free a context, after everything made with it. NULL is fine.
void pkv_context_destroy(struct pkv_context *ctx);

// Threads that a call on this context uses at most, the caller's included; 0 for NULL.
uint32_t pkv_context_num_threads(const struct pkv_context *ctx);

// ---- Paged KV collection -------------------------------------------------------------------------------------------------------------------------

// Keys and values of all layers in pages. The handle is the storage; what changes with every step is the plain struct pkv_batch.
//
// Blocks are [num_blocks, is_mla ? 1 : 2, num_layers, page_size, num_heads, head_size] row-major, scales the same with
// ceil(head_size / quantization_granularity) in the last place. The key cache of a layer is index 0 of the second dimension, the value cache index 1.
//
// Freed by pkv_collection_destroy. Must not outlive borrowed storage. Any number of threads may use it at once, as long as no slot that
// one call writes is read or written by another at the same time.
typedef struct pkv_collection pkv_collection;

// What a collection looks like.
typedef struct pkv_collection_options {
    // sizeof(pkv_collection_options)
    size_t struct_size;
    // PKV_F32, PKV_F16, PKV_BF16, PKV_F8_E4M3 or PKV_F8_E5M2.
    int32_t dtype;
    // PKV_DTYPE_NONE for no scales (a plain cast), or PKV_F32, PKV_BF16, PKV_F8_E8M0; only with an fp8 dtype.
    int32_t scale_dtype;
    uint32_t num_blocks;
    uint32_t num_layers;
    // Tokens in a page: any number from 1 up.
    uint32_t page_size;
    // KV heads; 1 for MLA.
    uint32_t num_heads;
    uint32_t head_size;
    // 0: keys and values; 1: one latent row a token (multi-head latent attention).
    uint32_t is_mla;
    // Columns that share a scale; 0 = head_size; only with a scale_dtype.
    uint32_t quantization_granularity;
    uint32_t reserved;
    // Borrowed storage of at least the bytes pkv_collection_storage_size tells; {NULL, 0}: the library allocates, zeroed, on the context's device. With
    // scales, both buffers are given or neither.
    pkv_buffer blocks;
    pkv_buffer scales;
} pkv_collection_options;

// One layer's keys or values: blocks [num_blocks, page_size, num_heads, head_size] and scales [.., groups] (absent without scales), strided over the
// collection's storage.
typedef struct pkv_cache_view {
    pkv_tensor blocks;
    pkv_tensor scales;
} pkv_cache_view;

// Bytes of blocks and scales that such a collection needs; the buffers in options are not looked at. Either output may be NULL.
pkv_status pkv_collection_storage_size(const struct pkv_collection_options *options, size_t *blocks_bytes, size_t *scales_bytes, pkv_error *err);

// Make a collection over borrowed or library-allocated storage.
pkv_status pkv_collection_create(const pkv_context *ctx, const struct pkv_collection_options *options, struct pkv_collection **out, pkv_error *err);

// Free a collection, and its storage where the library allocated it. No call may still use it. NULL is fine.
void pkv_collection_destroy(struct pkv_collection *collection);

// The options the collection was made with, buffers filled in. out->struct_size is read first, as in every call.
pkv_status pkv_collection_info(const struct pkv_collection *collection, struct pkv_collection_options *out, pkv_error *err);

// The keys of a layer (for MLA: its latent rows).
pkv_status pkv_collection_key_cache(const struct pkv_collection *collection, uint32_t layer_idx, struct pkv_cache_view *out, pkv_error *err);

// The values of a layer; PKV_ERR_VALUE for MLA, which has none.
pkv_status pkv_collection_value_cache(const struct pkv_collection *collection, uint32_t layer_idx, struct pkv_cache_view *out, pkv_error *err);

// ---- Ragged batch --------------------------------------------------------------------------------------------------------------------------------

// What changes with every step: how many new tokens each sequence brings, how many it has cached, and where its pages lie.
//
// Row t of a ragged tensor belongs to sequence b with input_row_offsets[b] <= t < input_row_offsets[b + 1]; its position is
// cache_lengths[b] + t - input_row_offsets[b]. Position p lies in block lookup_table[b][p / page_size], slot p % page_size. A sequence may bring
// no new tokens, and blocks may be shared by sequences that only read them. With batch_size 0 the pointers are not looked at.
typedef struct pkv_batch {
    // sizeof(pkv_batch)
    size_t struct_size;
    // [batch_size + 1], first 0, never falling; the last is the number of new tokens.
    const uint32_t *input_row_offsets;
    // [batch_size], tokens already in the cache, the new ones not counted.
    const uint32_t *cache_lengths;
    // [batch_size, lookup_table_stride]: page number -> block; entries past a sequence's pages are never read.
    const uint32_t *lookup_table;
    // Elements from one row of lookup_table to the next; 0 = max_pages.
    int64_t lookup_table_stride;
    uint32_t batch_size;
    // Columns of lookup_table.
    uint32_t max_pages;
    // At least the most new tokens of any sequence (a promise; checked on CPU).
    uint32_t max_seq_length;
    // At least the largest cache_length. CUDA calls plan for max_seq_length + max_cache_length positions.
    uint32_t max_cache_length;
} pkv_batch;

// ---- Store and gather ----------------------------------------------------------------------------------------------------------------------------

// Append rows to a key or value cache, converting or quantising.
//
// With scales, a row's group g of a head covers columns [g * granularity, min((g + 1) * granularity, head_size)):
// s = amax / FP8_MAX over its finite elements, 1 where that falls below 2^-126 or no element is finite; rounded to the scale dtype
// (F8_E8M0: the smallest power of two >= s); code = cast(x / s). Casts to fp8 round to nearest even and saturate; NaN stays NaN and an infinity saturates,
// neither changes its neighbours.
typedef struct pkv_kv_store_params {
    // sizeof(pkv_kv_store_params)
    size_t struct_size;
    const pkv_collection *collection;
    const pkv_batch *batch;
    uint32_t layer_idx;
    // 0: keys, 1: values.
    uint32_t kv_idx;
    // [T, num_heads, head_size], F32, F16 or BF16.
    pkv_tensor values;
} pkv_kv_store_params;

// Copy cached rows to a contiguous buffer, dequantising: out[r] = code * scale.
//
// Buffer row r of sequence b (buffer_row_offsets[b] <= r < buffer_row_offsets[b + 1]) holds position cache_offsets[b] + r - buffer_row_offsets[b],
// which lies below cache_length + new tokens; a sequence may ask for 0 rows at that end.
typedef struct pkv_kv_gather_params {
    // sizeof(pkv_kv_gather_params)
    size_t struct_size;
    const pkv_collection *collection;
    const pkv_batch *batch;
    uint32_t layer_idx;
    // 0: keys, 1: values.
    uint32_t kv_idx;
    // [batch_size + 1], first 0, never falling.
    const uint32_t *buffer_row_offsets;
    // [batch_size]: first cache position copied for each sequence; NULL = all 0.
    const uint32_t *cache_offsets;
    // [buffer_length, num_heads, head_size], F32, F16 or BF16.
    pkv_tensor out;
} pkv_kv_gather_params;

// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
pkv_status pkv_kv_store_workspace_size(const pkv_context *ctx, const struct pkv_kv_store_params *params, size_t *bytes, pkv_error *err);

// Write the new tokens' rows of one layer's keys or values; nothing else changes.
pkv_status pkv_kv_store(const pkv_context *ctx, pkv_stream stream, const struct pkv_kv_store_params *params, pkv_buffer workspace, pkv_error *err);

// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
pkv_status pkv_kv_gather_workspace_size(const pkv_context *ctx, const struct pkv_kv_gather_params *params, size_t *bytes, pkv_error *err);

// Read rows of one layer's keys or values.
pkv_status pkv_kv_gather(const pkv_context *ctx, pkv_stream stream, const struct pkv_kv_gather_params *params, pkv_buffer workspace, pkv_error *err);

// ---- GGUF weights --------------------------------------------------------------------------------------------------------------------------------

// Encodings carry GGUF's own type ids (ggml_type in ggml.h).
#define PKV_GGUF_F32 0
#define PKV_GGUF_F16 1
#define PKV_GGUF_Q4_0 2
#define PKV_GGUF_Q4_1 3
#define PKV_GGUF_Q5_0 6
#define PKV_GGUF_Q5_1 7
#define PKV_GGUF_Q8_0 8
#define PKV_GGUF_Q2_K 10
#define PKV_GGUF_Q3_K 11
#define PKV_GGUF_Q4_K 12
#define PKV_GGUF_Q5_K 13
#define PKV_GGUF_Q6_K 14
#define PKV_GGUF_IQ4_NL 20
#define PKV_GGUF_IQ4_XS 23
#define PKV_GGUF_BF16 30
#define PKV_GGUF_MXFP4 39
// Repack a copy for this machine's kernels: faster, and data may go afterwards. Without it data is borrowed as it lies (mmap), no copy.
#define PKV_WEIGHT_PACK 1

// A weight matrix of rows output features by cols inputs, in one GGUF encoding. Freed by pkv_gguf_weight_destroy; a borrowed one must not outlive its
// data. Any number of threads may use it at once.
typedef struct pkv_gguf_weight pkv_gguf_weight;

// Where a weight lies and what it is.
typedef struct pkv_gguf_weight_options {
    // sizeof(pkv_gguf_weight_options)
    size_t struct_size;
    // The raw blocks, as in the file; any alignment.
    const void *data;
    // Bytes at data: at least what rows and row_bytes span.
    size_t data_size;
    int64_t rows;
    // A multiple of the encoding's block.
    int64_t cols;
    // Bytes from one row to the next; 0: tight.
    int64_t row_bytes;
    // PKV_GGUF_*; any other number is PKV_ERR_UNSUPPORTED: GGUF's list is open.
    int32_t encoding;
    // 0 or PKV_WEIGHT_PACK.
    uint32_t flags;
} pkv_gguf_weight_options;

// Borrow or pack a weight matrix. CUDA contexts have no such kernels: PKV_ERR_UNSUPPORTED.
pkv_status pkv_gguf_weight_create(const pkv_context *ctx,
                                  const struct pkv_gguf_weight_options *options,
                                  struct pkv_gguf_weight **out,
                                  pkv_error *err);

// Free a weight; borrowed data stays. No call may still use it. NULL is fine.
void pkv_gguf_weight_destroy(struct pkv_gguf_weight *weight);

// Name ("Q4_K"; never freed), elements and bytes of an encoding's block; any output may be NULL. PKV_ERR_UNSUPPORTED for an encoding that is not built.
pkv_status pkv_gguf_encoding_info(int32_t encoding,
                                  const char **name,
                                  uint32_t *block_elements,
                                  uint32_t *block_bytes);

// ---- QKV projection ------------------------------------------------------------------------------------------------------------------------------

// Activations are quantised to 8 bits a block, as GGUF engines do: blocks of 32, of 256 for the K-quants and IQ4_XS; none for float weights.
#define PKV_COMPUTE_DEFAULT 0
// Exact f32 products of dequantised weights.
#define PKV_COMPUTE_F32 1

// Three matmuls, each weight in its own GGUF encoding (MAX: unfused_qkv_matmul_ragged_paged_gguf_quantized).
//
// y = x W^T (+ bias). Q goes to q_output, K and V straight into the pages, feature f to head f / head_size, column f % head_size. The collection has
// is_mla 0, and its num_heads is the number of KV heads (GQA). K and V are converted or quantised as pkv_kv_store does. No row of the result depends on the
// other rows of the batch. On a CUDA context: PKV_ERR_UNSUPPORTED.
typedef struct pkv_qkv_matmul_gguf_params {
    // sizeof(pkv_qkv_matmul_gguf_params)
    size_t struct_size;
    const pkv_collection *collection;
    const pkv_batch *batch;
    // [num_heads * head_size, K]
    const pkv_gguf_weight *q_weight;
    // [num_kv_heads * head_size, K]
    const pkv_gguf_weight *k_weight;
    // [num_kv_heads * head_size, K]
    const pkv_gguf_weight *v_weight;
    uint32_t layer_idx;
    // PKV_COMPUTE_*
    int32_t compute;
    // [T, K], F32, F16 or BF16.
    pkv_tensor hidden_state;
    // [T, num_heads * head_size], F32, F16 or BF16.
    pkv_tensor q_output;
    // [rows] F32; each may be absent.
    pkv_tensor q_bias;
    pkv_tensor k_bias;
    pkv_tensor v_bias;
} pkv_qkv_matmul_gguf_params;

// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
pkv_status pkv_qkv_matmul_gguf_workspace_size(const pkv_context *ctx, const struct pkv_qkv_matmul_gguf_params *params, size_t *bytes, pkv_error *err);

// Project the new tokens' hidden states to Q, K and V.
pkv_status pkv_qkv_matmul_gguf(const pkv_context *ctx,
                               pkv_stream stream,
                               const struct pkv_qkv_matmul_gguf_params *params,
                               pkv_buffer workspace,
                               pkv_error *err);

// ---- RoPE + RMSNorm + quantise -------------------------------------------------------------------------------------------------------------------

// RoPE rotates the pairs (2i, 2i + 1), as DeepSeek's attention does.
#define PKV_ROPE_INTERLEAVED 0
// RoPE rotates the pairs (i, i + R/2), as Llama's checkpoints and DeepSeek V3.2's indexer do.
#define PKV_ROPE_HALF_SPLIT 1

// Finish the MLA rows of the new tokens (MAX: fused_rope_rmsnorm_quantization_kernel; DeepSeek-V2, arXiv 2405.04434).
//
// For token t at position p: q_rope_output[t, h] = rope(q_rope[t, h]); the cache row is [gamma * rmsnorm(kv[t, :C]), rope(kv[t, C:])] with
// C = kv_lora_rank, R the rope width, C + R = head_size, cast to the cache dtype or quantised per group as pkv_kv_store does. Arithmetic is f32; the norm is
// rounded to the activations' dtype before gamma is multiplied, and again after. The collection has is_mla 1 and one head. All activations have one dtype:
// F32, F16 or BF16.
typedef struct pkv_mla_rope_rmsnorm_quantize_params {
    // sizeof(pkv_mla_rope_rmsnorm_quantize_params)
    size_t struct_size;
    const pkv_collection *collection;
    const pkv_batch *batch;
    uint32_t layer_idx;
    // PKV_ROPE_*
    int32_t rope;
    // [T, num_heads, R], any row and head stride (usually the tail of a wider q).
    pkv_tensor q_rope;
    // [T, num_heads, R]; may be the same memory as q_rope (in place).
    pkv_tensor q_rope_output;
    // [T, kv_lora_rank + R]
    pkv_tensor kv;
    // [max_positions, R]: cos0, sin0, cos1, sin1, ...; F32 or the activations' dtype. YaRN's frequencies go in here, its softmax scale into the
    // attention's scale. max_positions covers every position that the batch reaches; on CUDA, which cannot look, max_seq_length + max_cache_length.
    pkv_tensor freqs_cis;
    // [kv_lora_rank]; F32 or the activations' dtype.
    pkv_tensor gamma;
    // >= 0
    float epsilon;
    uint32_t reserved;
} pkv_mla_rope_rmsnorm_quantize_params;

// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
pkv_status pkv_mla_rope_rmsnorm_quantize_workspace_size(const pkv_context *ctx,
                                                        const struct pkv_mla_rope_rmsnorm_quantize_params *params,
                                                        size_t *bytes,
                                                        pkv_error *err);

// Rope the queries and write the finished cache rows.
pkv_status pkv_mla_rope_rmsnorm_quantize(const pkv_context *ctx,
                                         pkv_stream stream,
                                         const struct pkv_mla_rope_rmsnorm_quantize_params *params,
                                         pkv_buffer workspace,
                                         pkv_error *err);

// ---- FP8 MLA prefill -----------------------------------------------------------------------------------------------------------------------------

// q and the new cache rows are already roped and normed (an earlier call did it): skip that step; kv must be absent.
#define PKV_PREFILL_FINISHED 1
// Key position k is visible to query position p where k <= p.
#define PKV_MASK_CAUSAL 0
// All keys of the sequence.
#define PKV_MASK_NULL 1
// p - window < k <= p
#define PKV_MASK_SLIDING_WINDOW_CAUSAL 2
// k <= p and k / chunk == p / chunk
#define PKV_MASK_CHUNKED_CAUSAL 3
#define PKV_SCORE_MOD_NONE 0
// Adds slope_h * (k - p). With P the largest power of two <= H: slope_h = 2^(-8 (h + 1) / P) for h < P, else 2^(-8 (2 (h - P) + 1) / (2 P))
// (ALiBi, arXiv 2108.12409).
#define PKV_SCORE_MOD_ALIBI 1

// The prefill branch of DeepSeek's multi-head latent attention with fp8 weights (MAX: mla_prefill_branch_fp8; DeepSeek-V2, arXiv 2405.04434;
// DeepSeek-V3, arXiv 2412.19437).
//
// 1. Unless FINISHED: rope q[..., nope:] in place and finish the new cache rows as pkv_mla_rope_rmsnorm_quantize does, from kv or in place in the cache.
// 2. Gather the cached rows that buffer_row_offsets and cache_offsets name into a contiguous buffer. Keys outside are invisible, under every mask.
// 3. Quantise their latent part per row per 128 columns: s = min(amax, 1200) / 448, code = saturate(x * (1 / s)); zero codes where s is 0 or 1/s not finite.
// 4. Up-project with kv_b_proj: KV[r, n] = sum over groups g of (sum of code[r, k] * W[n, k]) * s[r, g] * Ws[n / 128, g], rounded to dtype.
// 5. Attention: score = scale * (q_nope . K_nope + q_rope . k_rope), k_rope the cached rope part, one for all heads; score mod, mask on absolute positions,
//    f32 softmax, times V, rounded to dtype.
//
// dtype, of q, kv and output, is F32, F16 or BF16; the cache is F32, F16, BF16, or F8_E4M3 with or without scales. The collection has is_mla 1 and one head.
// The scale is the caller's: DeepSeek with YaRN multiplies 1 / sqrt(nope + R) by mscale^2.
//
// Chunked prefill: the first call finishes q and the rows, later calls carry FINISHED; each covers a part of the keys; pkv_merge_attention joins the parts.
typedef struct pkv_mla_prefill_fp8_params {
    // sizeof(pkv_mla_prefill_fp8_params)
    size_t struct_size;
    const pkv_collection *collection;
    const pkv_batch *batch;
    uint32_t layer_idx;
    // PKV_ROPE_*; DeepSeek's own is interleaved.
    int32_t rope;
    // PKV_MASK_*
    int32_t mask;
    // PKV_SCORE_MOD_*
    int32_t score_mod;
    // For PKV_MASK_SLIDING_WINDOW_CAUSAL, at least 1.
    uint32_t window;
    // For PKV_MASK_CHUNKED_CAUSAL, at least 1.
    uint32_t chunk;
    // Rows, output features and columns that share a scale; 0 = 1, 128, 128, the one combination.
    uint32_t m_scale_granularity;
    uint32_t n_scale_granularity;
    uint32_t k_scale_granularity;
    // Of the scores; finite.
    float scale;
    // Of the norm; >= 0.
    float epsilon;
    // 0 or PKV_PREFILL_FINISHED.
    uint32_t flags;
    // Rows of the contiguous latent buffer; >= last of buffer_row_offsets (equal on CPU).
    int64_t buffer_length;
    // [batch_size + 1], first 0, never falling.
    const uint32_t *buffer_row_offsets;
    // [batch_size]: first cache position copied for each sequence; NULL = all 0.
    const uint32_t *cache_offsets;
    // [T, num_heads, nope + R]; its rope part is roped in place.
    pkv_tensor q;
    // [T, kv_lora_rank + R] new rows; absent: they already lie un-normed, un-roped in the cache and are finished in place.
    pkv_tensor kv;
    // [max_positions, R]: cos0, sin0, cos1, sin1, ...; F32 or the activations' dtype. max_positions covers every position that the batch reaches; on CUDA,
    // which cannot look, max_seq_length + max_cache_length. May be absent with FINISHED.
    pkv_tensor freqs_cis;
    // [kv_lora_rank]; F32 or the activations' dtype. May be absent with FINISHED.
    pkv_tensor kv_norm_gamma;
    // [num_heads * (nope + v_head_dim), kv_lora_rank] F8_E4M3: per head, nope K rows, then v_head_dim V rows (DeepSeek's own order).
    pkv_tensor kv_b_proj;
    // [ceil(num_heads * (nope + v_head_dim) / 128), kv_lora_rank / 128] F32
    pkv_tensor kv_b_proj_scale;
    // [T, num_heads, v_head_dim]
    pkv_tensor output;
    // Optional [T, num_heads] F32, natural log, of the scaled, modified, masked scores; a row with no visible key: -inf, output 0.
    pkv_tensor lse;
} pkv_mla_prefill_fp8_params;

// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
pkv_status pkv_mla_prefill_fp8_workspace_size(const pkv_context *ctx, const struct pkv_mla_prefill_fp8_params *params, size_t *bytes, pkv_error *err);

// Attention of the new tokens over cached latent rows.
pkv_status pkv_mla_prefill_fp8(const pkv_context *ctx,
                               pkv_stream stream,
                               const struct pkv_mla_prefill_fp8_params *params,
                               pkv_buffer workspace,
                               pkv_error *err);

// ---- FP8 MLA indexer -----------------------------------------------------------------------------------------------------------------------------

// DeepSeek V3.2's lightning indexer (MAX: mla_indexer_ragged_float8_paged; DeepSeek-V3.2-Exp report, DeepSeek Sparse Attention).
//
// score[t, s] = k_scale[s] * sum over h of q_s[t, h] * max(0, q[t, h] . k[s]): relu before the weight, weights may be negative, relu(NaN) = NaN. Visible keys:
// PKV_MASK_CAUSAL s <= position(t), PKV_MASK_NULL s < cache_length + new tokens. Keys and queries come roped (V3.2's indexer rotates half-split pairs), the
// head weights folded into q_s. Rows are scored in windows: scratch does not grow with the number of rows beyond one. The result is the same bits in
// every run and for every batch composition. A sequence has up to 2^31 - 1 positions.
typedef struct pkv_mla_indexer_fp8_params {
    // sizeof(pkv_mla_indexer_fp8_params)
    size_t struct_size;
    // Keys F8_E4M3, one head, F32 scales, granularity >= head_size; is_mla 0 or 1.
    const pkv_collection *collection;
    const pkv_batch *batch;
    uint32_t layer_idx;
    // PKV_MASK_CAUSAL or PKV_MASK_NULL.
    int32_t mask;
    // At least 1.
    uint32_t top_k;
    uint32_t reserved;
    // [T, num_heads, head_size] F8_E4M3
    pkv_tensor q;
    // [T, num_heads] F32: query scale times head weight.
    pkv_tensor q_s;
    // [T, top_k] I32: key positions, best first, equal scores (-0 equals +0) lower position first, NaN scores after all others, lower position first;
    // the rest -1. Every column is written.
    pkv_tensor output_indices;
    // Optional [T, top_k] F32, -inf where the index is -1.
    pkv_tensor output_scores;
} pkv_mla_indexer_fp8_params;

// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
pkv_status pkv_mla_indexer_fp8_workspace_size(const pkv_context *ctx, const struct pkv_mla_indexer_fp8_params *params, size_t *bytes, pkv_error *err);

// The min(top_k, visible) best keys of every new token.
pkv_status pkv_mla_indexer_fp8(const pkv_context *ctx,
                               pkv_stream stream,
                               const struct pkv_mla_indexer_fp8_params *params,
                               pkv_buffer workspace,
                               pkv_error *err);

// ---- Merge of partial attention ------------------------------------------------------------------------------------------------------------------

// Join two partial results of chunked prefill by their lse: lse = log(exp(a) + exp(b)), out = out_a * exp(a - lse) + out_b * exp(b - lse); where both are
// -inf: 0 and -inf.
typedef struct pkv_merge_attention_params {
    // sizeof(pkv_merge_attention_params)
    size_t struct_size;
    // [T, H, D], F32, F16 or BF16, one dtype for a, b and output. There is no batch: T is shape[0], the same for all, and every row is joined.
    pkv_tensor output_a;
    // [T, H] F32
    pkv_tensor lse_a;
    pkv_tensor output_b;
    pkv_tensor lse_b;
    // May be the memory of a or of b; so may lse.
    pkv_tensor output;
    // May be absent.
    pkv_tensor lse;
} pkv_merge_attention_params;

// Bytes of scratch that such a call needs; data and batch array pointers may still be NULL.
pkv_status pkv_merge_attention_workspace_size(const pkv_context *ctx, const struct pkv_merge_attention_params *params, size_t *bytes, pkv_error *err);

// Merge a and b into output.
pkv_status pkv_merge_attention(const pkv_context *ctx,
                               pkv_stream stream,
                               const struct pkv_merge_attention_params *params,
                               pkv_buffer workspace,
                               pkv_error *err);

#ifdef __cplusplus
}
#endif
#endif
