// Joins two partial attention results by their log-sum-exp:
//     lse = log(exp(a) + exp(b)),  out = out_a exp(a - lse) + out_b exp(b - lse);  both -inf: 0 and -inf.
// A warp a row (token, head). A side without keys weighs 0 and its row is not looked at.
#include "params.cuh"
#include "rows.cuh"

constexpr u32 THREADS = 128;

template <class T, u32 N> PKV_DEVICE void merge_rows(const MergeAttentionParams &p) {
    const u64 warps = u64(gridDim.x) * (THREADS / WARP), rows = p.tokens * p.num_heads;
    for (u64 row = u64(blockIdx.x) * (THREADS / WARP) + warp_id(); row < rows; row += warps) {
        const i64 token = i64(row / p.num_heads);
        const u32 head = u32(row - u64(token) * p.num_heads);
        const float a = p.lse_a[token * p.lse_a_stride + head], b = p.lse_b[token * p.lse_b_stride + head];
        const float top = a > b ? a : b;
        const float lse = a == -f32_inf() && b == -f32_inf() ? top : top + logf(expf(a - top) + expf(b - top));
        const float weight_a = a == -f32_inf() ? 0.0f : expf(a - lse),
                    weight_b = b == -f32_inf() ? 0.0f : expf(b - lse);
        __syncwarp(); // lse may be the memory of lse_a or lse_b: every lane has read them
        if (p.lse && lane_id() == 0) p.lse[token * p.lse_stride + head] = lse;
        const T *out_a = static_cast<const T *>(p.output_a) + token * p.a_token_stride + i64(head) * p.a_head_stride;
        const T *out_b = static_cast<const T *>(p.output_b) + token * p.b_token_stride + i64(head) * p.b_head_stride;
        T *out = static_cast<T *>(p.output) + token * p.output_token_stride + i64(head) * p.output_head_stride;
        for (u32 c = lane_id() * N; c < p.width; c += WARP * N) {
            float x[N] = {}, y[N] = {};
            if (weight_a != 0.0f) load_elements<T, N>(out_a + c, x);
            if (weight_b != 0.0f) load_elements<T, N>(out_b + c, y);
            PKV_UNROLL
            for (u32 j = 0; j < N; j++) x[j] = __fadd_rn(__fmul_rn(x[j], weight_a), __fmul_rn(y[j], weight_b));
            store_elements<T, N>(out + c, x);
        }
    }
}

template <class T> PKV_DEVICE void merge_attention(const MergeAttentionParams &p) {
    if (p.vector) merge_rows<T, Pack<T>::size>(p);
    else merge_rows<T, 1>(p);
}

PKV_KERNEL(merge_attention_f32, MergeAttentionParams, THREADS, 1) { merge_attention<float>(p); }
PKV_KERNEL(merge_attention_f16, MergeAttentionParams, THREADS, 1) { merge_attention<f16>(p); }
PKV_KERNEL(merge_attention_bf16, MergeAttentionParams, THREADS, 1) { merge_attention<bf16>(p); }
