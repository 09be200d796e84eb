/* The binary interface in numbers: size of every struct and offset of every field on a 64-bit target. A change here breaks every program
 * built before it; new fields are added at the end, and get a row of their own. The rows of a struct leave no gap: no padding. */
#include "check.h"

#include <stdint.h>

static size_t field_end; /* where the last field ended */

#define STRUCT(type, size) (CHECK(sizeof(type) == (size)), CHECK(field_end == 0 || field_end == last_size), last_size = (size), field_end = 0)
#define FIELD(type, field, offset) (CHECK(offsetof(type, field) == (offset)), CHECK(field_end == (offset)), field_end += sizeof(((type *)0)->field))

int main(void)
{
    size_t last_size = 0;

    STRUCT(pkv_error, 512);
    FIELD(pkv_error, struct_size, 0);
    FIELD(pkv_error, status, 8);
    FIELD(pkv_error, native_code, 12);
    FIELD(pkv_error, argument, 16);
    FIELD(pkv_error, message, 64);

    STRUCT(pkv_buffer, 16);
    FIELD(pkv_buffer, data, 0);
    FIELD(pkv_buffer, size, 8);

    STRUCT(pkv_stream, 8);
    FIELD(pkv_stream, native, 0);

    STRUCT(pkv_tensor, 80);
    FIELD(pkv_tensor, data, 0);
    FIELD(pkv_tensor, dtype, 8);
    FIELD(pkv_tensor, ndim, 12);
    FIELD(pkv_tensor, shape, 16);
    FIELD(pkv_tensor, stride, 48);

    STRUCT(pkv_context_options, 64);
    FIELD(pkv_context_options, struct_size, 0);
    FIELD(pkv_context_options, abi_version, 8);
    FIELD(pkv_context_options, backend, 12);
    FIELD(pkv_context_options, device, 16);
    FIELD(pkv_context_options, log_level, 20);
    FIELD(pkv_context_options, log, 24);
    FIELD(pkv_context_options, log_user, 32);
    FIELD(pkv_context_options, parallel_for, 40);
    FIELD(pkv_context_options, parallel_user, 48);
    FIELD(pkv_context_options, num_threads, 56);
    FIELD(pkv_context_options, reserved, 60);

    STRUCT(pkv_collection_options, 80);
    FIELD(pkv_collection_options, struct_size, 0);
    FIELD(pkv_collection_options, dtype, 8);
    FIELD(pkv_collection_options, scale_dtype, 12);
    FIELD(pkv_collection_options, num_blocks, 16);
    FIELD(pkv_collection_options, num_layers, 20);
    FIELD(pkv_collection_options, page_size, 24);
    FIELD(pkv_collection_options, num_heads, 28);
    FIELD(pkv_collection_options, head_size, 32);
    FIELD(pkv_collection_options, is_mla, 36);
    FIELD(pkv_collection_options, quantization_granularity, 40);
    FIELD(pkv_collection_options, reserved, 44);
    FIELD(pkv_collection_options, blocks, 48);
    FIELD(pkv_collection_options, scales, 64);

    STRUCT(pkv_cache_view, 160);
    FIELD(pkv_cache_view, blocks, 0);
    FIELD(pkv_cache_view, scales, 80);

    STRUCT(pkv_batch, 56);
    FIELD(pkv_batch, struct_size, 0);
    FIELD(pkv_batch, input_row_offsets, 8);
    FIELD(pkv_batch, cache_lengths, 16);
    FIELD(pkv_batch, lookup_table, 24);
    FIELD(pkv_batch, lookup_table_stride, 32);
    FIELD(pkv_batch, batch_size, 40);
    FIELD(pkv_batch, max_pages, 44);
    FIELD(pkv_batch, max_seq_length, 48);
    FIELD(pkv_batch, max_cache_length, 52);

    STRUCT(pkv_gguf_weight_options, 56);
    FIELD(pkv_gguf_weight_options, struct_size, 0);
    FIELD(pkv_gguf_weight_options, data, 8);
    FIELD(pkv_gguf_weight_options, data_size, 16);
    FIELD(pkv_gguf_weight_options, rows, 24);
    FIELD(pkv_gguf_weight_options, cols, 32);
    FIELD(pkv_gguf_weight_options, row_bytes, 40);
    FIELD(pkv_gguf_weight_options, encoding, 48);
    FIELD(pkv_gguf_weight_options, flags, 52);

    STRUCT(pkv_qkv_matmul_gguf_params, 456);
    FIELD(pkv_qkv_matmul_gguf_params, struct_size, 0);
    FIELD(pkv_qkv_matmul_gguf_params, collection, 8);
    FIELD(pkv_qkv_matmul_gguf_params, batch, 16);
    FIELD(pkv_qkv_matmul_gguf_params, q_weight, 24);
    FIELD(pkv_qkv_matmul_gguf_params, k_weight, 32);
    FIELD(pkv_qkv_matmul_gguf_params, v_weight, 40);
    FIELD(pkv_qkv_matmul_gguf_params, layer_idx, 48);
    FIELD(pkv_qkv_matmul_gguf_params, compute, 52);
    FIELD(pkv_qkv_matmul_gguf_params, hidden_state, 56);
    FIELD(pkv_qkv_matmul_gguf_params, q_output, 136);
    FIELD(pkv_qkv_matmul_gguf_params, q_bias, 216);
    FIELD(pkv_qkv_matmul_gguf_params, k_bias, 296);
    FIELD(pkv_qkv_matmul_gguf_params, v_bias, 376);

    STRUCT(pkv_mla_rope_rmsnorm_quantize_params, 440);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, struct_size, 0);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, collection, 8);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, batch, 16);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, layer_idx, 24);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, rope, 28);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, q_rope, 32);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, q_rope_output, 112);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, kv, 192);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, freqs_cis, 272);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, gamma, 352);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, epsilon, 432);
    FIELD(pkv_mla_rope_rmsnorm_quantize_params, reserved, 436);

    STRUCT(pkv_mla_prefill_fp8_params, 736);
    FIELD(pkv_mla_prefill_fp8_params, struct_size, 0);
    FIELD(pkv_mla_prefill_fp8_params, collection, 8);
    FIELD(pkv_mla_prefill_fp8_params, batch, 16);
    FIELD(pkv_mla_prefill_fp8_params, layer_idx, 24);
    FIELD(pkv_mla_prefill_fp8_params, rope, 28);
    FIELD(pkv_mla_prefill_fp8_params, mask, 32);
    FIELD(pkv_mla_prefill_fp8_params, score_mod, 36);
    FIELD(pkv_mla_prefill_fp8_params, window, 40);
    FIELD(pkv_mla_prefill_fp8_params, chunk, 44);
    FIELD(pkv_mla_prefill_fp8_params, m_scale_granularity, 48);
    FIELD(pkv_mla_prefill_fp8_params, n_scale_granularity, 52);
    FIELD(pkv_mla_prefill_fp8_params, k_scale_granularity, 56);
    FIELD(pkv_mla_prefill_fp8_params, scale, 60);
    FIELD(pkv_mla_prefill_fp8_params, epsilon, 64);
    FIELD(pkv_mla_prefill_fp8_params, flags, 68);
    FIELD(pkv_mla_prefill_fp8_params, buffer_length, 72);
    FIELD(pkv_mla_prefill_fp8_params, buffer_row_offsets, 80);
    FIELD(pkv_mla_prefill_fp8_params, cache_offsets, 88);
    FIELD(pkv_mla_prefill_fp8_params, q, 96);
    FIELD(pkv_mla_prefill_fp8_params, kv, 176);
    FIELD(pkv_mla_prefill_fp8_params, freqs_cis, 256);
    FIELD(pkv_mla_prefill_fp8_params, kv_norm_gamma, 336);
    FIELD(pkv_mla_prefill_fp8_params, kv_b_proj, 416);
    FIELD(pkv_mla_prefill_fp8_params, kv_b_proj_scale, 496);
    FIELD(pkv_mla_prefill_fp8_params, output, 576);
    FIELD(pkv_mla_prefill_fp8_params, lse, 656);

    STRUCT(pkv_mla_indexer_fp8_params, 360);
    FIELD(pkv_mla_indexer_fp8_params, struct_size, 0);
    FIELD(pkv_mla_indexer_fp8_params, collection, 8);
    FIELD(pkv_mla_indexer_fp8_params, batch, 16);
    FIELD(pkv_mla_indexer_fp8_params, layer_idx, 24);
    FIELD(pkv_mla_indexer_fp8_params, mask, 28);
    FIELD(pkv_mla_indexer_fp8_params, top_k, 32);
    FIELD(pkv_mla_indexer_fp8_params, reserved, 36);
    FIELD(pkv_mla_indexer_fp8_params, q, 40);
    FIELD(pkv_mla_indexer_fp8_params, q_s, 120);
    FIELD(pkv_mla_indexer_fp8_params, output_indices, 200);
    FIELD(pkv_mla_indexer_fp8_params, output_scores, 280);

    STRUCT(pkv_kv_store_params, 112);
    FIELD(pkv_kv_store_params, struct_size, 0);
    FIELD(pkv_kv_store_params, collection, 8);
    FIELD(pkv_kv_store_params, batch, 16);
    FIELD(pkv_kv_store_params, layer_idx, 24);
    FIELD(pkv_kv_store_params, kv_idx, 28);
    FIELD(pkv_kv_store_params, values, 32);

    STRUCT(pkv_kv_gather_params, 128);
    FIELD(pkv_kv_gather_params, struct_size, 0);
    FIELD(pkv_kv_gather_params, collection, 8);
    FIELD(pkv_kv_gather_params, batch, 16);
    FIELD(pkv_kv_gather_params, layer_idx, 24);
    FIELD(pkv_kv_gather_params, kv_idx, 28);
    FIELD(pkv_kv_gather_params, buffer_row_offsets, 32);
    FIELD(pkv_kv_gather_params, cache_offsets, 40);
    FIELD(pkv_kv_gather_params, out, 48);

    STRUCT(pkv_merge_attention_params, 488);
    FIELD(pkv_merge_attention_params, struct_size, 0);
    FIELD(pkv_merge_attention_params, output_a, 8);
    FIELD(pkv_merge_attention_params, lse_a, 88);
    FIELD(pkv_merge_attention_params, output_b, 168);
    FIELD(pkv_merge_attention_params, lse_b, 248);
    FIELD(pkv_merge_attention_params, output, 328);
    FIELD(pkv_merge_attention_params, lse, 408);
    STRUCT(pkv_status, 4);

    CHECK(sizeof(void *) == 8 && sizeof(size_t) == 8);
    CHECK(((pkv_status)-1) < 0);
    return check_end();
}
