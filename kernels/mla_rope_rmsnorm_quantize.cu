// New MLA rows in one launch: rope on the queries' rope part; RMS norm and gamma on the latent, rope on the shared key
// part, and the finished row cast or quantised to its slot.
//
// Naively, for token t at position p:
//     q_out[t, h] = rope(q[t, h], freqs[p])                               rounded to T
//     n = round(kv[t, :C] / sqrt(mean(kv[t, :C]^2) + epsilon)); n = round(n * gamma)
//     k = round(rope(kv[t, C:], freqs[p]));  cache[slot] = quantise([n, k])
// Here a token has 1 + q_warps warps. Warp 0 does the row: it goes over the latent twice (the sum of squares, then the
// values; the second time from L1), puts the finished row of T into its part of shared memory, and hands that to the
// same routine that kv_store uses. The others share the heads' units of 16 bytes. Nothing waits for another warp.
//
// kv null: the un-finished row is read from the slot itself (to f32), which the detour over shared memory makes safe.
#include "params.cuh"
#include "rows.cuh"

constexpr u32 THREADS = 128;

template <class T, u32 N, bool HALF>
PKV_DEVICE void finish_row(const MlaRopeRmsnormQuantizeParams &p, u64 token, Slot slot, i64 freqs_row, T *finished) {
    const T *kv = p.kv ? static_cast<const T *>(p.kv) + i64(token) * p.kv_stride : nullptr;
    auto load = [&](u32 c, auto &x) {
        if (kv) {
            load_elements(kv + c, x);
        } else if constexpr (N > 1) {
            load_cached(p.cache, slot, 0, c, x);
        } else { // two neighbours may have two scales
            for (u32 j = 0; j < sizeof(x) / sizeof(float); j++) {
                float one[1];
                load_cached(p.cache, slot, 0, c + j, one);
                x[j] = one[0];
            }
        }
    };
    const u32 lane = lane_id();
    float sum = 0.0f;
    for (u32 c = lane * N; c < p.latent; c += WARP * N) {
        float x[N];
        load(c, x);
        PKV_UNROLL
        for (u32 j = 0; j < N; j++) sum = __fadd_rn(sum, __fmul_rn(x[j], x[j]));
    }
    sum = warp_sum(sum);
    const float root = __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(p.latent)), p.epsilon));
    for (u32 c = lane * N; c < p.latent; c += WARP * N) {
        float x[N], gamma[N];
        load(c, x);
        load_f32s<N, (N > 1)>(p.gamma, p.gamma_dtype, c, gamma);
        PKV_UNROLL
        for (u32 j = 0; j < N; j++) x[j] = __fmul_rn(round_to<T>(__fdiv_rn(x[j], root)), gamma[j]);
        store_elements<T, N>(finished + c, x);
    }
    for (u32 unit = lane; unit < rope_units<N, HALF>(p.rope_width); unit += WARP)
        rope_unit<N, HALF>(
            unit, p.rope_width, p.freqs, p.freqs_dtype, freqs_row, [&](u32 c, auto &x) { load(p.latent + c, x); },
            [&](u32 c, auto &x) { store_elements(finished + p.latent + c, x); });
    __syncwarp();
    store_row<T, N>(p.cache, slot, 0, finished);
}

template <class T, u32 N, bool HALF>
PKV_DEVICE void rope_heads(const MlaRopeRmsnormQuantizeParams &p, u64 token, u32 part, i64 freqs_row) {
    const T *q = static_cast<const T *>(p.q_rope) + i64(token) * p.q_token_stride;
    T *out = static_cast<T *>(p.q_rope_output) + i64(token) * p.output_token_stride;
    const u32 per_head = rope_units<N, HALF>(p.rope_width);
    const u64 units = u64(per_head) * p.num_heads;
    for (u64 i = u64(part) * WARP + lane_id(); i < units; i += u64(p.q_warps) * WARP) {
        const u32 head = u32(i / per_head), unit = u32(i - u64(head) * per_head);
        const T *from = q + i64(head) * p.q_head_stride;
        T *to = out + i64(head) * p.output_head_stride;
        rope_unit<N, HALF>(
            unit, p.rope_width, p.freqs, p.freqs_dtype, freqs_row, [&](u32 c, auto &x) { load_elements(from + c, x); },
            [&](u32 c, auto &x) { store_elements(to + c, x); });
    }
}

template <class T, u32 N, bool HALF>
PKV_DEVICE void mla_rope_rmsnorm_quantize_rows(const MlaRopeRmsnormQuantizeParams &p) {
    PKV_DYNAMIC_SHARED(T, rows); // [blockDim / 32][head_size, rounded up to 16 bytes]
    T *finished = rows + warp_id() * round_up(p.cache.head_size, Pack<T>::size);
    const u32 warps_per_block = blockDim.x / WARP, per_token = 1 + p.q_warps;
    const u64 warps = u64(gridDim.x) * warps_per_block, items = p.tokens * per_token;
    for (u64 item = u64(blockIdx.x) * warps_per_block + warp_id(); item < items; item += warps) {
        const u64 token = item / per_token;
        const u32 part = u32(item - token * per_token);
        TokenPlace place;
        if (!find_token(p.batch, token, place)) return;
        if (place.position >= p.max_positions) continue;
        const i64 freqs_row = i64(place.position) * p.freqs_stride;
        if (part > 0) {
            rope_heads<T, N, HALF>(p, token, part - 1, freqs_row);
        } else {
            Slot slot;
            if (!find_slot(p.batch, p.cache, place.sequence, place.position, slot)) continue;
            __syncwarp(); // the row of the round before is read
            finish_row<T, N, HALF>(p, token, slot, freqs_row, finished);
        }
    }
}

template <class T> PKV_DEVICE void mla_rope_rmsnorm_quantize(const MlaRopeRmsnormQuantizeParams &p) {
    if (p.vector && p.half_split) mla_rope_rmsnorm_quantize_rows<T, Pack<T>::size, true>(p);
    else if (p.vector) mla_rope_rmsnorm_quantize_rows<T, Pack<T>::size, false>(p);
    else if (p.half_split) mla_rope_rmsnorm_quantize_rows<T, 1, true>(p);
    else mla_rope_rmsnorm_quantize_rows<T, 1, false>(p);
}

PKV_KERNEL(mla_rope_rmsnorm_quantize_f32, MlaRopeRmsnormQuantizeParams, THREADS, 1) {
    mla_rope_rmsnorm_quantize<float>(p);
}
PKV_KERNEL(mla_rope_rmsnorm_quantize_f16, MlaRopeRmsnormQuantizeParams, THREADS, 1) {
    mla_rope_rmsnorm_quantize<f16>(p);
}
PKV_KERNEL(mla_rope_rmsnorm_quantize_bf16, MlaRopeRmsnormQuantizeParams, THREADS, 1) {
    mla_rope_rmsnorm_quantize<bf16>(p);
}
