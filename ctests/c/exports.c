/* Every function is there, with the types that callers in other languages wrote down; version macros, functions and names agree. */
#include "check.h"

/* The compiler compares the types, the linker finds the symbol; volatile keeps both honest. */
#define CALLABLE(result, name, arguments)         \
    do {                                          \
        result(*volatile address) arguments = name; \
        CHECK(address != NULL);                   \
    } while (0)

static void functions(void)
{
    CALLABLE(uint32_t, pkv_abi_version, (void));
    CALLABLE(const char *, pkv_version, (void));
    CALLABLE(const char *, pkv_build_info, (void));
    CALLABLE(const char *, pkv_status_name, (pkv_status));
    CALLABLE(pkv_status, pkv_context_create, (const pkv_context_options *, pkv_context **, pkv_error *));
    CALLABLE(void, pkv_context_destroy, (pkv_context *));
    CALLABLE(uint32_t, pkv_context_num_threads, (const pkv_context *));
    CALLABLE(pkv_status, pkv_collection_storage_size, (const pkv_collection_options *, size_t *, size_t *, pkv_error *));
    CALLABLE(pkv_status, pkv_collection_create, (const pkv_context *, const pkv_collection_options *, pkv_collection **, pkv_error *));
    CALLABLE(void, pkv_collection_destroy, (pkv_collection *));
    CALLABLE(pkv_status, pkv_collection_info, (const pkv_collection *, pkv_collection_options *, pkv_error *));
    CALLABLE(pkv_status, pkv_collection_key_cache, (const pkv_collection *, uint32_t, pkv_cache_view *, pkv_error *));
    CALLABLE(pkv_status, pkv_collection_value_cache, (const pkv_collection *, uint32_t, pkv_cache_view *, pkv_error *));
    CALLABLE(pkv_status, pkv_gguf_weight_create, (const pkv_context *, const pkv_gguf_weight_options *, pkv_gguf_weight **, pkv_error *));
    CALLABLE(void, pkv_gguf_weight_destroy, (pkv_gguf_weight *));
    CALLABLE(pkv_status, pkv_gguf_encoding_info, (int32_t, const char **, uint32_t *, uint32_t *));
    CALLABLE(pkv_status, pkv_qkv_matmul_gguf_workspace_size, (const pkv_context *, const pkv_qkv_matmul_gguf_params *, size_t *, pkv_error *));
    CALLABLE(pkv_status, pkv_qkv_matmul_gguf, (const pkv_context *, pkv_stream, const pkv_qkv_matmul_gguf_params *, pkv_buffer, pkv_error *));
    CALLABLE(pkv_status, pkv_mla_rope_rmsnorm_quantize_workspace_size, (const pkv_context *, const pkv_mla_rope_rmsnorm_quantize_params *, size_t *, pkv_error *));
    CALLABLE(pkv_status, pkv_mla_rope_rmsnorm_quantize, (const pkv_context *, pkv_stream, const pkv_mla_rope_rmsnorm_quantize_params *, pkv_buffer, pkv_error *));
    CALLABLE(pkv_status, pkv_mla_prefill_fp8_workspace_size, (const pkv_context *, const pkv_mla_prefill_fp8_params *, size_t *, pkv_error *));
    CALLABLE(pkv_status, pkv_mla_prefill_fp8, (const pkv_context *, pkv_stream, const pkv_mla_prefill_fp8_params *, pkv_buffer, pkv_error *));
    CALLABLE(pkv_status, pkv_mla_indexer_fp8_workspace_size, (const pkv_context *, const pkv_mla_indexer_fp8_params *, size_t *, pkv_error *));
    CALLABLE(pkv_status, pkv_mla_indexer_fp8, (const pkv_context *, pkv_stream, const pkv_mla_indexer_fp8_params *, pkv_buffer, pkv_error *));
    CALLABLE(pkv_status, pkv_kv_store_workspace_size, (const pkv_context *, const pkv_kv_store_params *, size_t *, pkv_error *));
    CALLABLE(pkv_status, pkv_kv_store, (const pkv_context *, pkv_stream, const pkv_kv_store_params *, pkv_buffer, pkv_error *));
    CALLABLE(pkv_status, pkv_kv_gather_workspace_size, (const pkv_context *, const pkv_kv_gather_params *, size_t *, pkv_error *));
    CALLABLE(pkv_status, pkv_kv_gather, (const pkv_context *, pkv_stream, const pkv_kv_gather_params *, pkv_buffer, pkv_error *));
    CALLABLE(pkv_status, pkv_merge_attention_workspace_size, (const pkv_context *, const pkv_merge_attention_params *, size_t *, pkv_error *));
    CALLABLE(pkv_status, pkv_merge_attention, (const pkv_context *, pkv_stream, const pkv_merge_attention_params *, pkv_buffer, pkv_error *));
}

static void versions(void)
{
    char macros[32];
    snprintf(macros, sizeof macros, "%d.%d.%d", PKV_VERSION_MAJOR, PKV_VERSION_MINOR, PKV_VERSION_PATCH);
    CHECK(strcmp(pkv_version(), macros) == 0);
    CHECK(strcmp(macros, PAGEDKV_CARGO_VERSION) == 0); /* Cargo.toml's, given by the build */
    CHECK(pkv_abi_version() == PKV_ABI_VERSION);
    CHECK(pkv_version() == pkv_version()); /* static strings: nobody frees them */
    CHECK(strstr(pkv_build_info(), macros) != NULL);
    CHECK(strchr(pkv_build_info(), '\n') == NULL);
}

static void status_names(void)
{
#define NAMED(status) CHECK(strcmp(pkv_status_name(status), #status) == 0)
    NAMED(PKV_OK);
    NAMED(PKV_ERR_NULL);
    NAMED(PKV_ERR_VALUE);
    NAMED(PKV_ERR_SHAPE);
    NAMED(PKV_ERR_DTYPE);
    NAMED(PKV_ERR_ALIGNMENT);
    NAMED(PKV_ERR_WORKSPACE);
    NAMED(PKV_ERR_PAGE_TABLE);
    NAMED(PKV_ERR_ABI);
    NAMED(PKV_ERR_UNSUPPORTED);
    NAMED(PKV_ERR_NO_DEVICE);
    NAMED(PKV_ERR_NO_MEMORY);
    NAMED(PKV_ERR_DEVICE);
    NAMED(PKV_ERR_INTERNAL);
    const pkv_status unknown[] = {1, -1, 99, 108, 301, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; ++i) {
        CHECK(pkv_status_name(unknown[i]) != NULL && pkv_status_name(unknown[i])[0]);
        CHECK(strncmp(pkv_status_name(unknown[i]), "PKV_ERR_NULL", 12) != 0);
    }
}

static void numbers(void)
{
    /* Bindings copy these numbers; they never change. */
    CHECK(PKV_OK == 0 && PKV_ERR_NULL == 100 && PKV_ERR_VALUE == 101 && PKV_ERR_SHAPE == 102 && PKV_ERR_DTYPE == 103);
    CHECK(PKV_ERR_ALIGNMENT == 104 && PKV_ERR_WORKSPACE == 105 && PKV_ERR_PAGE_TABLE == 106 && PKV_ERR_ABI == 107);
    CHECK(PKV_ERR_UNSUPPORTED == 200 && PKV_ERR_NO_DEVICE == 201 && PKV_ERR_NO_MEMORY == 202 && PKV_ERR_DEVICE == 203 && PKV_ERR_INTERNAL == 300);
    CHECK(PKV_DTYPE_NONE == 0 && PKV_F32 == 1 && PKV_F16 == 2 && PKV_BF16 == 3 && PKV_F8_E4M3 == 4 && PKV_F8_E5M2 == 5);
    CHECK(PKV_F8_E8M0 == 6 && PKV_U8 == 7 && PKV_I8 == 8 && PKV_U32 == 9 && PKV_I32 == 10 && PKV_I64 == 11);
    CHECK(PKV_BACKEND_CPU == 0 && PKV_BACKEND_CUDA == 1);
    CHECK(PKV_LOG_OFF == 0 && PKV_LOG_ERROR == 1 && PKV_LOG_WARN == 2 && PKV_LOG_INFO == 3 && PKV_LOG_DEBUG == 4);
    CHECK(PKV_GGUF_F32 == 0 && PKV_GGUF_F16 == 1 && PKV_GGUF_Q4_0 == 2 && PKV_GGUF_Q4_1 == 3 && PKV_GGUF_Q5_0 == 6 && PKV_GGUF_Q5_1 == 7);
    CHECK(PKV_GGUF_Q8_0 == 8 && PKV_GGUF_Q2_K == 10 && PKV_GGUF_Q3_K == 11 && PKV_GGUF_Q4_K == 12 && PKV_GGUF_Q5_K == 13 && PKV_GGUF_Q6_K == 14);
    CHECK(PKV_GGUF_IQ4_NL == 20 && PKV_GGUF_IQ4_XS == 23 && PKV_GGUF_BF16 == 30 && PKV_GGUF_MXFP4 == 39);
    CHECK(PKV_WEIGHT_PACK == 1 && PKV_COMPUTE_DEFAULT == 0 && PKV_COMPUTE_F32 == 1);
    CHECK(PKV_ROPE_INTERLEAVED == 0 && PKV_ROPE_HALF_SPLIT == 1 && PKV_PREFILL_FINISHED == 1);
    CHECK(PKV_MASK_CAUSAL == 0 && PKV_MASK_NULL == 1 && PKV_MASK_SLIDING_WINDOW_CAUSAL == 2 && PKV_MASK_CHUNKED_CAUSAL == 3);
    CHECK(PKV_SCORE_MOD_NONE == 0 && PKV_SCORE_MOD_ALIBI == 1);
}

int main(void)
{
    functions();
    versions();
    status_names();
    numbers();
    return check_end();
}
